/* SHA-256 (FIPS 180-4): one compression function in the best form that the processor has, and the
 * keys of block chains made with it. A block of 16 tokens takes two compressions, so what counts is
 * the cost of a call, which Python's hashlib has too much of. */
#include "kernel.h"

#include <string.h>

typedef void compress(uint32_t state[8], const uint8_t *blocks, size_t count);

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static uint32_t load_be(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void store_be(uint8_t *at, uint32_t word) {
    at[0] = (uint8_t)(word >> 24), at[1] = (uint8_t)(word >> 16);
    at[2] = (uint8_t)(word >> 8), at[3] = (uint8_t)word;
}

static uint32_t rotated(uint32_t word, int by) { return word >> by | word << (32 - by); }

static void compress_plainly(uint32_t state[8], const uint8_t *blocks, size_t count) {
    for (; count; count--, blocks += 64) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++) w[i] = load_be(blocks + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
                   (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
        }
        memcpy(s, state, 32);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t one = s[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                           ((e & s[5]) ^ (~e & s[6])) + K[i] + w[i];
            uint32_t two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                           ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 28);
            s[4] += one;
            s[0] = one + two;
        }
        for (int i = 0; i < 8; i++) state[i] += s[i];
    }
}

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,sse4.1,ssse3"))) static void compress_by_sha(
    uint32_t state[8], const uint8_t *blocks, size_t count) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    /* The instructions keep the state as ABEF and CDGH. */
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8);
    __m128i cdgh = _mm_blend_epi16(high, low, 0xf0);
    for (; count; count--, blocks += 64) {
        __m128i before_abef = abef, before_cdgh = cdgh, w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)blocks + i), big_endian);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i now = w[i & 3];
            __m128i sum = _mm_add_epi32(now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12) { /* the words of round i + 4 */
                __m128i next = _mm_sha256msg1_epu32(now, w[(i + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4));
                w[i & 3] = _mm_sha256msg2_epu32(next, w[(i + 3) & 3]);
            }
        }
        abef = _mm_add_epi32(abef, before_abef);
        cdgh = _mm_add_epi32(cdgh, before_cdgh);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static int has_sha(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 &&
           __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#elif defined(__aarch64__)

#include <arm_neon.h>
#include <sys/auxv.h>

__attribute__((target("+crypto"))) static void compress_by_sha(
    uint32_t state[8], const uint8_t *blocks, size_t count) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; count; count--, blocks += 64) {
        uint32x4_t before_abcd = abcd, before_efgh = efgh, w[4];
        for (int i = 0; i < 4; i++)
            w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * i)));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            uint32x4_t sum = vaddq_u32(w[i & 3], vld1q_u32(K + 4 * i)), abcd_before = abcd;
            if (i < 12)
                w[i & 3] = vsha256su1q_u32(vsha256su0q_u32(w[i & 3], w[(i + 1) & 3]),
                                           w[(i + 2) & 3], w[(i + 3) & 3]);
            abcd = vsha256hq_u32(abcd, efgh, sum);
            efgh = vsha256h2q_u32(efgh, abcd_before, sum);
        }
        abcd = vaddq_u32(abcd, before_abcd);
        efgh = vaddq_u32(efgh, before_efgh);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

static int has_sha(void) {
    return (int)(getauxval(AT_HWCAP) >> 6 & 1); /* HWCAP_SHA2 */
}

#endif

/* ---- the choice */

static const char *names[3];
static compress *forms[3];
static int chosen;

__attribute__((constructor)) static void choose(void) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    if (has_sha()) names[count] = "sha", forms[count++] = compress_by_sha;
#endif
    names[count] = "plain", forms[count++] = compress_plainly;
    names[count] = NULL;
}

const char *const *kernel_hash_forms(void) { return names; }

const char *kernel_hash_form(void) { return names[chosen]; }

int kernel_use_hash(const char *name) {
    for (int i = 0; names[i]; i++)
        if (!strcmp(names[i], name)) return chosen = i, 1;
    return 0;
}

/* ---- digests */

/* The digest of `size` bytes, of which `state` has seen all but the last `left`, at `rest`. */
static void finish(uint32_t state[8], const uint8_t *rest, size_t left, uint64_t size,
                   uint8_t digest[32]) {
    uint8_t last[128] = {0};
    size_t blocks = left < 56 ? 1 : 2;
    memcpy(last, rest, left);
    last[left] = 0x80;
    store_be(last + 64 * blocks - 8, (uint32_t)(size >> 29));
    store_be(last + 64 * blocks - 4, (uint32_t)(size << 3));
    forms[chosen](state, last, blocks);
    for (int i = 0; i < 8; i++) store_be(digest + 4 * i, state[i]);
}

/* The digest of a head of at most 63 bytes and a body. */
static void digest_of(const uint8_t *head, size_t head_bytes, const uint8_t *body,
                      size_t body_bytes, uint8_t digest[32]) {
    uint32_t state[8];
    uint8_t first[64];
    uint64_t size = (uint64_t)head_bytes + body_bytes;
    memcpy(state, INITIAL, 32);
    memcpy(first, head, head_bytes);
    if (size < 64) {
        memcpy(first + head_bytes, body, body_bytes);
        finish(state, first, (size_t)size, size, digest);
        return;
    }
    size_t taken = 64 - head_bytes;
    memcpy(first + head_bytes, body, taken);
    forms[chosen](state, first, 1);
    body += taken, body_bytes -= taken;
    if (body_bytes >= 64) forms[chosen](state, body, body_bytes / 64);
    finish(state, body + (body_bytes & ~(size_t)63), body_bytes & 63, size, digest);
}

void kernel_chain(const uint8_t parent[32], uint32_t first, const uint8_t *tokens,
                  size_t block_bytes, size_t count, uint8_t *keys) {
    uint8_t head[36];
    memcpy(head, parent, 32);
    for (size_t i = 0; i < count; i++) {
        uint32_t index = first + (uint32_t)i;
        for (int byte = 0; byte < 4; byte++) head[32 + byte] = (uint8_t)(index >> 8 * byte);
        digest_of(head, sizeof head, tokens + i * block_bytes, block_bytes, keys + 32 * i);
        memcpy(head, keys + 32 * i, 32);
    }
}

void kernel_sha256(const uint8_t *root, size_t root_bytes, const uint8_t *id, size_t id_bytes,
                   uint8_t digest[32]) {
    digest_of(root, root_bytes, id, id_bytes, digest);
}
