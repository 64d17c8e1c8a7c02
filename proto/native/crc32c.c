/* CRC32C by folding: the message is a polynomial, and a chunk that lies D bits before another one
 * is multiplied by x^D modulo P and added to it. So wide registers take in the message at the speed
 * of memory, and what is left in them at the end goes through the processor's CRC instruction.
 *
 * Method: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction", Intel 2009. For bit-reflected data the two factors of a fold over D bits are
 * reflect(x^(D+32) mod P) and reflect(x^(D-32) mod P), shifted left by one.
 */
#include "kernel.h"

#include <string.h>

typedef uint32_t checksum(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size);

/* Compiled once for each constant argument. */
#define INLINE __attribute__((always_inline)) static inline

/* ---- the table: any processor */

static uint32_t table[8][256];

static void make_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
        table[0][n] = crc;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++)
            table[k][n] = table[k - 1][n] >> 8 ^ table[0][table[k - 1][n] & 0xff];
}

static uint64_t load64(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}

static uint32_t crc_by_table(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    crc = ~crc;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; size >= 8; size -= 8, from += 8) {
        uint64_t word = load64(from);
        if (to) memcpy(to, &word, 8), to += 8;
        word ^= crc;
        crc = table[7][word & 0xff] ^ table[6][word >> 8 & 0xff] ^ table[5][word >> 16 & 0xff] ^
              table[4][word >> 24 & 0xff] ^ table[3][word >> 32 & 0xff] ^
              table[2][word >> 40 & 0xff] ^ table[1][word >> 48 & 0xff] ^ table[0][word >> 56];
    }
#endif
    for (; size; size--) {
        uint8_t byte = *from++;
        if (to) *to++ = byte;
        crc = crc >> 8 ^ table[0][(crc ^ byte) & 0xff];
    }
    return ~crc;
}

#if defined(__x86_64__)

#include <immintrin.h>

#define SSE __attribute__((target("sse4.2,pclmul")))
#define AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512bw,avx512vl,vpclmulqdq")))

/* Factors of a fold over 512 and over 128 bits, and over 2,048. The low word is the first. */
#define FOLD_512 0x9e4addf8, 0x740eef02
#define FOLD_128 0x493c7d27, 0xf20c0dfe
#define FOLD_2048 0xb9e02b86, 0xdcb17aa4

/* The rest of a message with the processor's CRC instruction. `crc` is not inverted. */
SSE static uint32_t rest_by_sse(uint64_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    for (; size >= 8; size -= 8, from += 8) {
        uint64_t word = load64(from);
        if (to) memcpy(to, &word, 8), to += 8;
        crc = _mm_crc32_u64(crc, word);
    }
    for (; size; size--) {
        uint8_t byte = *from++;
        if (to) *to++ = byte;
        crc = _mm_crc32_u8((uint32_t)crc, byte);
    }
    return (uint32_t)crc;
}

SSE static inline __m128i fold128(__m128i from, __m128i factors, __m128i into) {
    __m128i low = _mm_clmulepi64_si128(from, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(from, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), into);
}

/* Store to the cache, or around it: then `at` is aligned. */
SSE static inline void put128(void *at, __m128i value, int around) {
    if (around)
        _mm_stream_si128(at, value);
    else
        _mm_storeu_si128(at, value);
}

SSE INLINE uint32_t clmul(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size, int around) {
    uint64_t left = ~crc;
    if (size >= 64) {
        const __m128i factors = _mm_set_epi64x(FOLD_512), near = _mm_set_epi64x(FOLD_128);
        const __m128i *in = (const __m128i *)from;
        __m128i sum[4];
        for (int i = 0; i < 4; i++) {
            sum[i] = _mm_loadu_si128(in + i);
            if (to) put128(to + 16 * i, sum[i], around);
        }
        sum[0] = _mm_xor_si128(sum[0], _mm_cvtsi32_si128((int)~crc));
        for (;;) {
            from += 64, size -= 64;
            if (to) to += 64;
            if (size < 64) break;
            in = (const __m128i *)from;
            __m128i next0 = _mm_loadu_si128(in), next1 = _mm_loadu_si128(in + 1);
            __m128i next2 = _mm_loadu_si128(in + 2), next3 = _mm_loadu_si128(in + 3);
            if (to) {
                put128(to, next0, around), put128(to + 16, next1, around);
                put128(to + 32, next2, around), put128(to + 48, next3, around);
            }
            sum[0] = fold128(sum[0], factors, next0), sum[1] = fold128(sum[1], factors, next1);
            sum[2] = fold128(sum[2], factors, next2), sum[3] = fold128(sum[3], factors, next3);
        }
        for (int i = 0; i < 3; i++) sum[i + 1] = fold128(sum[i], near, sum[i + 1]);
        left = _mm_crc32_u64(0, (uint64_t)_mm_extract_epi64(sum[3], 0));
        left = _mm_crc32_u64(left, (uint64_t)_mm_extract_epi64(sum[3], 1));
    }
    return ~rest_by_sse(left, to, from, size);
}

SSE static uint32_t crc_by_clmul(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    return clmul(crc, to, from, size, 0);
}

/* Stores around the cache have no order of their own. The fences keep theirs: a row that was removed
 * is gone before its room is overwritten, and a row that is listed later has all of its bytes. */
SSE static uint32_t around_by_clmul(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    if ((uintptr_t)to % 16) return clmul(crc, to, from, size, 0);
    _mm_sfence();
    crc = clmul(crc, to, from, size, 1);
    _mm_sfence();
    return crc;
}

AVX512 static inline __m512i fold512(__m512i from, __m512i factors, __m512i into) {
    __m512i low = _mm512_clmulepi64_epi128(from, factors, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(from, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, into, 0x96); /* the xor of all three */
}

AVX512 static inline void put512(void *at, __m512i value, int around) {
    if (around)
        _mm512_stream_si512(at, value);
    else
        _mm512_storeu_si512(at, value);
}

AVX512 INLINE uint32_t avx512(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size,
                              int around) {
    if (size < 256) return crc_by_clmul(crc, to, from, size);
    const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_2048));
    const __m512i near = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_512));
    __m512i sum0 = _mm512_loadu_si512(from), sum1 = _mm512_loadu_si512(from + 64);
    __m512i sum2 = _mm512_loadu_si512(from + 128), sum3 = _mm512_loadu_si512(from + 192);
    if (to) {
        put512(to, sum0, around), put512(to + 64, sum1, around);
        put512(to + 128, sum2, around), put512(to + 192, sum3, around);
    }
    sum0 = _mm512_xor_si512(sum0, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (;;) {
        from += 256, size -= 256;
        if (to) to += 256;
        if (size < 256) break;
        __m512i next0 = _mm512_loadu_si512(from), next1 = _mm512_loadu_si512(from + 64);
        __m512i next2 = _mm512_loadu_si512(from + 128), next3 = _mm512_loadu_si512(from + 192);
        if (to) {
            put512(to, next0, around), put512(to + 64, next1, around);
            put512(to + 128, next2, around), put512(to + 192, next3, around);
        }
        sum0 = fold512(sum0, factors, next0), sum1 = fold512(sum1, factors, next1);
        sum2 = fold512(sum2, factors, next2), sum3 = fold512(sum3, factors, next3);
    }
    sum1 = fold512(sum0, near, sum1);
    sum2 = fold512(sum1, near, sum2);
    sum3 = fold512(sum2, near, sum3);
    uint64_t words[8], left = 0;
    _mm512_storeu_si512(words, sum3);
    for (int i = 0; i < 8; i++) left = _mm_crc32_u64(left, words[i]);
    return ~rest_by_sse(left, to, from, size);
}

AVX512 static uint32_t crc_by_avx512(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    return avx512(crc, to, from, size, 0);
}

AVX512 static uint32_t around_by_avx512(uint32_t crc, uint8_t *to, const uint8_t *from,
                                        size_t size) {
    if ((uintptr_t)to % 64) return around_by_clmul(crc, to, from, size);
    _mm_sfence();
    crc = avx512(crc, to, from, size, 1);
    _mm_sfence();
    return crc;
}

#elif defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>

#define CRC __attribute__((target("+crc")))
#define PMULL __attribute__((target("+crc+crypto")))

CRC static uint32_t rest_by_crc(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    for (; size >= 8; size -= 8, from += 8) {
        uint64_t word = load64(from);
        if (to) memcpy(to, &word, 8), to += 8;
        crc = __crc32cd(crc, word);
    }
    for (; size; size--) {
        uint8_t byte = *from++;
        if (to) *to++ = byte;
        crc = __crc32cb(crc, byte);
    }
    return crc;
}

CRC static uint32_t crc_by_crc(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    return ~rest_by_crc(~crc, to, from, size);
}

PMULL static inline uint64x2_t fold(uint64x2_t from, const poly64_t factors[2], uint64x2_t into) {
    poly128_t low = vmull_p64((poly64_t)vgetq_lane_u64(from, 0), factors[0]);
    poly128_t high = vmull_p64((poly64_t)vgetq_lane_u64(from, 1), factors[1]);
    uint64x2_t sum = veorq_u64(vreinterpretq_u64_p128(low), vreinterpretq_u64_p128(high));
    return veorq_u64(sum, into);
}

PMULL static uint32_t crc_by_pmull(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    uint32_t left = ~crc;
    if (size >= 64) {
        /* Over 512 and over 128 bits; the low word is the first. */
        static const poly64_t factors[2] = {0x740eef02, 0x9e4addf8};
        static const poly64_t near[2] = {0xf20c0dfe, 0x493c7d27};
        uint64x2_t sum[4];
        for (int i = 0; i < 4; i++) {
            uint8x16_t bytes = vld1q_u8(from + 16 * i);
            if (to) vst1q_u8(to + 16 * i, bytes);
            sum[i] = vreinterpretq_u64_u8(bytes);
        }
        sum[0] = veorq_u64(sum[0], vsetq_lane_u64(left, vdupq_n_u64(0), 0));
        for (;;) {
            from += 64, size -= 64;
            if (to) to += 64;
            if (size < 64) break;
            for (int i = 0; i < 4; i++) {
                uint8x16_t bytes = vld1q_u8(from + 16 * i);
                if (to) vst1q_u8(to + 16 * i, bytes);
                sum[i] = fold(sum[i], factors, vreinterpretq_u64_u8(bytes));
            }
        }
        for (int i = 0; i < 3; i++) sum[i + 1] = fold(sum[i], near, sum[i + 1]);
        left = __crc32cd(0, vgetq_lane_u64(sum[3], 0));
        left = __crc32cd(left, vgetq_lane_u64(sum[3], 1));
    }
    return ~rest_by_crc(left, to, from, size);
}

#endif

/* ---- the choice */

static const char *names[4];
/* Of each form: to the cache, and around it where it can. */
static checksum *forms[4], *around[4];
static int chosen;

static void add(int *count, const char *name, checksum *form, checksum *around_form) {
    names[*count] = name;
    forms[*count] = form;
    around[(*count)++] = around_form;
}

__attribute__((constructor)) static void choose(void) {
    int count = 0;
    make_table();
#if defined(__x86_64__)
    __builtin_cpu_init();
    int clmul = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq");
    if (clmul && wide) add(&count, "avx512", crc_by_avx512, around_by_avx512);
    if (clmul) add(&count, "clmul", crc_by_clmul, around_by_clmul);
#elif defined(__aarch64__)
    unsigned long has = getauxval(AT_HWCAP);
    enum { HAS_PMULL = 1 << 4, HAS_CRC32 = 1 << 7 };
    if (has & HAS_CRC32 && has & HAS_PMULL) add(&count, "pmull", crc_by_pmull, crc_by_pmull);
    if (has & HAS_CRC32) add(&count, "crc", crc_by_crc, crc_by_crc);
#endif
    add(&count, "table", crc_by_table, crc_by_table);
    names[count] = NULL;
}

const char *const *kernel_checksum_forms(void) { return names; }

const char *kernel_checksum_form(void) { return names[chosen]; }

int kernel_use_checksum(const char *name) {
    for (int i = 0; names[i]; i++)
        if (!strcmp(names[i], name)) return chosen = i, 1;
    return 0;
}

uint32_t kernel_crc32c(uint32_t crc, const uint8_t *from, size_t size) {
    return forms[chosen](crc, NULL, from, size);
}

uint32_t kernel_copy_crc32c(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    return forms[chosen](crc, to, from, size);
}

uint32_t kernel_store_crc32c(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size) {
    return around[chosen](crc, to, from, size);
}
