/* Looks entries up in an index that another process writes (`proto/index.py` has its format).
 *
 * The order of loads. The writer completes a row, and only then links it; it unlinks a row and
 * zeroes its generation before it lets the extents be written again. So a reader loads a link with
 * acquire before it reads the row behind it, and orders a validation behind all loads of the bytes
 * that it validates. x86-64 does both by itself; AArch64 does neither without being told.
 */
#include "kernel.h"

#include <string.h>

enum {
    STATE_OFFSET = 128,
    SHAPE_OFFSET = 136,
    HEADS_OFFSET = 4096,
    TRIES = 8,
};
/* One change, as the shape counts them. */
static const uint64_t CHANGE = 1ull << 33;
static const uint32_t ONE_EXTENT = 0x33333333;
static const uint64_t LIVE = 0x4556494c58444e49, HEADS_MASK = 0xffffffff, MOVING = 1ull << 32;

/* The CRC32C of a whole row and its own checksum: that of the four bytes of its kind. */
static const uint32_t WHOLE_ONE_EXTENT = 0x38d621fa; /* 33 33 33 33 */
static const uint32_t WHOLE_EXTENTS = 0xd9b4f580;    /* 55 55 55 55 */
static const uint32_t WHOLE_CONTINUATION = 0xa9059fbd; /* 66 66 66 66 */

static uint32_t load32(const uint8_t *at) {
    return __atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE);
}

static uint64_t load64(const uint8_t *at) {
    return __atomic_load_n((const uint64_t *)at, __ATOMIC_ACQUIRE);
}

static uint32_t u32_of(const uint8_t *row, size_t at) {
    uint32_t word;
    memcpy(&word, row + at, 4);
    return word;
}

static uint64_t u64_of(const uint8_t *row, size_t at) {
    uint64_t word;
    memcpy(&word, row + at, 8);
    return word;
}

int kernel_index_live(const struct kernel_index *index) {
    return load64(index->data + STATE_OFFSET) == LIVE;
}

/* The rest of a row with several extents, behind its first CHECKED_BYTES. 0: it is damaged, or was
 * changed meanwhile. */
static int complete(const struct kernel_index *index, uint8_t *row, size_t *row_bytes) {
    uint64_t generation = u64_of(row, GENERATION_OFFSET);
    uint32_t extents = u32_of(row, EXTENTS_OFFSET), number = u32_of(row, CONTINUATION_OFFSET);
    if (extents < 2 || extents > MAX_EXTENTS) return 0;
    uint32_t missing = 2 * (extents - 1);
    uint8_t part[CHECKED_BYTES];
    *row_bytes = CHECKED_BYTES;
    for (uint32_t position = 0; missing; position++) {
        if (number >= index->rows) return 0;
        memcpy(part, index->data + (size_t)number * ROW_BYTES, CHECKED_BYTES);
        if (kernel_crc32c(0, part, CHECKED_BYTES) != WHOLE_CONTINUATION) return 0;
        if (u64_of(part, 8 * WORDS_PER_ROW) != generation) return 0;
        if (u32_of(part, 8 * WORDS_PER_ROW + 8) != position) return 0;
        number = u32_of(part, 8 * WORDS_PER_ROW + 12);
        uint32_t words = missing < WORDS_PER_ROW ? missing : WORDS_PER_ROW;
        memcpy(row + *row_bytes, part, 8 * words);
        *row_bytes += 8 * words;
        missing -= words;
    }
    return 1;
}

/* The head of a key's chain, among `count` heads. */
static uint64_t bucket_of(const uint8_t key[32], const uint64_t multiplier[2], uint64_t count) {
    uint64_t word = u64_of(key, 0);
    uint64_t hash =
        (uint64_t)((unsigned __int128)word * multiplier[0] >> 64) + word * multiplier[1];
    uint64_t mask = count > 1 ? (2ull << (63 - __builtin_clzll(count - 1))) - 1 : 0;
    uint64_t bucket = hash & mask;
    return bucket < count ? bucket : bucket & mask >> 1;
}

uint32_t kernel_index_find(const struct kernel_index *index, const uint8_t key[32], uint8_t *row,
                           size_t *row_bytes) {
    if (!kernel_index_live(index)) return 0;
    for (int tries = TRIES; tries; tries--) {
        uint64_t shape = load64(index->data + SHAPE_OFFSET);
        uint64_t count = shape & HEADS_MASK;
        if (!count) count = 1;
        if (count > index->max_heads) count = index->max_heads;
        uint64_t bucket = bucket_of(key, index->multiplier, count);
        uint32_t number = load32(index->data + HEADS_OFFSET + 4 * bucket);
        int torn = 0;
        for (int steps = MAX_CHAIN; number && number < index->rows; ) {
            const uint8_t *there = index->data + (size_t)number * ROW_BYTES;
            if (!memcmp(there, key, 32)) {
                memcpy(row, there, CHECKED_BYTES);
                uint32_t crc = kernel_crc32c(0, row, CHECKED_BYTES);
                *row_bytes = CHECKED_BYTES;
                if (!memcmp(row, key, 32) &&
                    (crc == WHOLE_ONE_EXTENT ||
                     (crc == WHOLE_EXTENTS && complete(index, row, row_bytes))))
                    return number;
                torn = 1;
                break;
            }
            if (!--steps) break;
            number = load32(there + LINK_OFFSET);
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!torn && !(shape & MOVING) && load64(index->data + SHAPE_OFFSET) == shape) break;
    }
    return 0;
}

int kernel_index_stands(const struct kernel_index *index, uint32_t number, uint64_t generation) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!generation || number >= index->rows) return 0;
    return load64(index->data + (size_t)number * ROW_BYTES + GENERATION_OFFSET) == generation;
}

/* ---- the writer */

static uint8_t *head_of(struct kernel_writer *writer, const uint8_t key[32]) {
    uint64_t bucket = bucket_of(key, writer->multiplier, writer->count);
    return writer->data + HEADS_OFFSET + 4 * bucket;
}

static void publish32(uint8_t *at, uint32_t word) {
    __atomic_store_n((uint32_t *)at, word, __ATOMIC_RELEASE);
}

static void publish64(uint8_t *at, uint64_t word) {
    __atomic_store_n((uint64_t *)at, word, __ATOMIC_RELEASE);
}

/* Whether there is a row of this number, behind the header and the heads in use. */
static int is_row(const struct kernel_writer *writer, uint32_t number) {
    uint64_t start = (uint64_t)number * ROW_BYTES;
    return number < writer->rows && start >= HEADS_OFFSET + 4 * (uint64_t)writer->count;
}

int kernel_index_put(struct kernel_writer *writer, uint8_t *row) {
    uint8_t *head = head_of(writer, row);
    uint32_t first = load32(head), number = first;
    for (int length = 0; number; length++) {
        if (!is_row(writer, number) || length == MAX_CHAIN) return PUT_OTHERWISE;
        const uint8_t *there = writer->data + (size_t)number * ROW_BYTES;
        if (!memcmp(there, row, 32)) return PUT_OTHERWISE;
        number = load32(there + LINK_OFFSET);
        if (!number && length + 1 == MAX_CHAIN) return PUT_OTHERWISE;
    }
    number = writer->free_row;
    if (number) {
        if (!is_row(writer, number)) return PUT_OTHERWISE;
        writer->free_row = load32(writer->data + (size_t)number * ROW_BYTES + LINK_OFFSET);
    } else {
        number = writer->fresh_row;
        if (number >= writer->secured_row || !is_row(writer, number)) return PUT_OTHERWISE;
        writer->fresh_row++;
    }
    uint32_t checksum = kernel_crc32c(0, row, CHECKSUM_OFFSET) ^ ONE_EXTENT;
    memcpy(row + CHECKSUM_OFFSET, &checksum, sizeof checksum);
    uint8_t *place = writer->data + (size_t)number * ROW_BYTES;
    memcpy(place, row, CHECKED_BYTES);
    publish32(place + LINK_OFFSET, first);
    publish32(head, number);
    return PUT_DONE;
}

int kernel_index_delete(struct kernel_writer *writer, const uint8_t key[32]) {
    uint8_t *before = head_of(writer, key);
    uint32_t number = load32(before);
    for (int length = 0; number; length++) {
        if (!is_row(writer, number) || length == MAX_CHAIN) return DELETE_OTHERWISE;
        uint8_t *there = writer->data + (size_t)number * ROW_BYTES;
        if (!memcmp(there, key, 32)) {
            if (u32_of(there, CONTINUATION_OFFSET)) return DELETE_OTHERWISE;
            publish32(before, load32(there + LINK_OFFSET));
            publish64(there + GENERATION_OFFSET, 0);
            /* Before its link changes: a reader that is at this row has to notice. */
            writer->shape += CHANGE;
            publish64(writer->data + SHAPE_OFFSET, writer->shape);
            publish32(there + LINK_OFFSET, writer->free_row);
            writer->free_row = number;
            return DELETE_DONE;
        }
        before = there + LINK_OFFSET;
        number = load32(before);
    }
    return DELETE_ABSENT;
}

void kernel_index_published(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
