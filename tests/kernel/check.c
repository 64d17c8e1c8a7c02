/* Checks the kernel without Python, so that sanitisers and other processors can run it: every form
 * gives the table's and the plain one's results, copies stay within their bounds, and an index of
 * any content is read within it. Arguments: the seed, and how many inputs of each kind.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../proto/native/kernel.h"

static uint64_t state;

/* xorshift64* */
static uint64_t any(void) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717ull;
}

static void fill(uint8_t *to, size_t size) {
    for (size_t i = 0; i < size; i++) to[i] = (uint8_t)(any() >> 56);
}

static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "wrong: %s\n", what);
    exit(1);
}

static void checksums(void) {
    /* Ends exactly at the end of what was allocated, so that a sanitiser sees one byte too many. */
    size_t size = any() % 3 ? any() % 700 : any() % 70000, before = any() % 8;
    uint8_t *from = malloc(before + size + 1), *to = malloc(before + size + 1);
    uint32_t crc = (uint32_t)any();
    fill(from, before + size);
    kernel_use_checksum("table");
    uint32_t expected = kernel_crc32c(crc, from + before, size);
    for (const char *const *name = kernel_checksum_forms(); *name; name++) {
        kernel_use_checksum(*name);
        require(kernel_crc32c(crc, from + before, size) == expected, *name);
        for (int around = 0; around < 2; around++) {
            memset(to, 0xa5, before + size + 1);
            uint32_t found = (around ? kernel_store_crc32c : kernel_copy_crc32c)(
                crc, to + before, from + before, size);
            require(found == expected, *name);
            require(!memcmp(to + before, from + before, size), "a copy");
            require(to[before + size] == 0xa5 && (!before || to[before - 1] == 0xa5), "a bound");
        }
    }
    free(from), free(to);
}

static void hashes(void) {
    size_t block_bytes = 4 * (1 + any() % 40), count = any() % 5;
    uint8_t parent[32], *tokens = malloc(block_bytes * count + 1);
    uint8_t expected[5 * 32], keys[5 * 32];
    uint32_t first = (uint32_t)any();
    fill(parent, 32), fill(tokens, block_bytes * count);
    kernel_use_hash("plain");
    kernel_chain(parent, first, tokens, block_bytes, count, expected);
    for (const char *const *name = kernel_hash_forms(); *name; name++) {
        kernel_use_hash(*name);
        kernel_chain(parent, first, tokens, block_bytes, count, keys);
        require(!memcmp(keys, expected, 32 * count), *name);
    }
    free(tokens);
}

/* FIPS 180-4's example of one block, and the check value of CRC-32C. */
static void known(void) {
    static const uint8_t abc[4] = {0xba, 0x78, 0x16, 0xbf};
    uint8_t digest[32];
    for (const char *const *name = kernel_hash_forms(); *name; name++) {
        kernel_use_hash(*name);
        kernel_sha256((const uint8_t *)"a", 1, (const uint8_t *)"bc", 2, digest);
        require(!memcmp(digest, abc, 4), *name);
    }
    for (const char *const *name = kernel_checksum_forms(); *name; name++) {
        kernel_use_checksum(*name);
        require(kernel_crc32c(0, (const uint8_t *)"123456789", 9) == 0xe3069283, *name);
    }
}

static void store32(uint8_t *at, uint32_t word) { memcpy(at, &word, 4); }
static void store64(uint8_t *at, uint64_t word) { memcpy(at, &word, 8); }

/* An index that is right in most places and anything in some: rows of all kinds with right
 * checksums, links and continuations that lead anywhere. */
static void indexes(void) {
    static uint8_t row[LONGEST_ROW_BYTES];
    uint32_t heads = 1 + any() % 64, rows = 45 + (uint32_t)(any() % 30);
    size_t size = (size_t)rows * ROW_BYTES;
    if (size < 4096 + 4 * heads) size = 4096 + 4 * heads;
    size = (size + 7) & ~(size_t)7;
    uint8_t *data = malloc(size), keys[8][32];
    static const uint32_t kinds[3] = {0x33333333, 0x55555555, 0x66666666};
    if (any() % 4) memset(data, 0, size);
    else fill(data, size);
    fill(keys[0], sizeof keys);
    for (uint32_t head = 0; head < heads; head++)
        store32(data + 4096 + 4 * head, any() % 8 ? 45 + any() % 30 : (uint32_t)any());
    for (uint32_t number = 45; number < rows; number++) {
        uint8_t *at = data + (size_t)number * ROW_BYTES;
        if ((size_t)(at - data) < 4096 + 4 * heads) continue;
        fill(at, ROW_BYTES);
        memcpy(at, keys[any() % 8], 32);
        store32(at + 80, any() % 3 ? any() % 30 : (uint32_t)any());
        store32(at + 84, any() % 8 ? 45 + any() % 30 : (uint32_t)any());
        if (any() % 2) store64(at + 72, 7), store32(at + 80, any() % 3);
        if (any() % 2) store64(at + 32, 7);
        if (any() % 8) store32(at + 88, kernel_crc32c(0, at, 88) ^ kinds[any() % 3]);
        store32(at + 92, any() % 8 ? any() % 80 : (uint32_t)any());
    }
    store64(data + 128, any() % 8 ? 0x4556494c58444e49 : any());
    store64(data + 136, any() % 4 ? any() % 80 : any());
    struct kernel_index index = {data, heads, (uint32_t)(size / ROW_BYTES), {any() | 1, any()}};
    if (any() % 4 == 0) index.rows = rows;
    for (int i = 0; i < 8; i++) {
        size_t row_bytes = 0;
        uint32_t number = kernel_index_find(&index, keys[i], row, &row_bytes);
        if (!number) continue;
        require(number < index.rows && !memcmp(row, keys[i], 32), "a row of another key");
        require(row_bytes >= CHECKED_BYTES && row_bytes <= LONGEST_ROW_BYTES, "the size of a row");
        uint64_t generation;
        memcpy(&generation, row + 32, 8);
        require(kernel_index_stands(&index, number, generation) == (generation != 0), "stands");
    }
    require(!kernel_index_stands(&index, index.rows, 7), "a row beyond the end");
    free(data);
}

int main(int count, char **arguments) {
    state = count > 1 ? strtoull(arguments[1], NULL, 0) | 1 : 1;
    unsigned long inputs = count > 2 ? strtoul(arguments[2], NULL, 0) : 100000;
    known();
    kernel_use_checksum(kernel_checksum_forms()[0]);
    for (unsigned long i = 0; i < inputs; i++) indexes();
    for (unsigned long i = 0; i < inputs; i++) hashes();
    for (unsigned long i = 0; i < inputs / 10; i++) checksums();
    printf("%lu inputs of each kind are right; forms:", inputs);
    for (const char *const *name = kernel_checksum_forms(); *name; name++) printf(" %s", *name);
    for (const char *const *name = kernel_hash_forms(); *name; name++) printf(" %s", *name);
    puts("");
    return 0;
}
