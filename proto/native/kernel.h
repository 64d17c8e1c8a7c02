/* The native kernel: checksums, checked copies, hashes and index rows over plain memory.
 *
 * Nothing here knows Python, allocates, or fails: `module.c` checks every size and offset before it
 * calls. The pure forms in `proto/payload.py`, `proto/keys.py` and `proto/index_reader.py` give the
 * same results, bit for bit.
 */
#ifndef PREFIXD_KERNEL_H
#define PREFIXD_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* ---- CRC32C (Castagnoli, as in iSCSI), with and without a copy */

/* The CRC32C of `size` bytes, continuing `crc`. */
uint32_t kernel_crc32c(uint32_t crc, const uint8_t *from, size_t size);

/* Copy `size` bytes, and return the CRC32C of what was stored, continuing `crc`. Each byte is read
 * once: what another process writes to `from` meanwhile changes both the copy and its checksum, or
 * neither. The ranges do not overlap. */
uint32_t kernel_copy_crc32c(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size);

/* The same for bytes that nobody reads soon: past the processor's cache where the form of the
 * checksum can, so that what else is in it stays. Whoever sees these stores sees all before them, and
 * whoever sees a later store sees these. */
uint32_t kernel_store_crc32c(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size);

/* ---- SHA-256 */

/* The key of each of `count` blocks, one after the other in `keys` (32 bytes each):
 * SHA-256(key before it || u32le(first + i) || block_bytes of tokens). `block_bytes` is a multiple
 * of 4. */
void kernel_chain(const uint8_t parent[32], uint32_t first, const uint8_t *tokens,
                  size_t block_bytes, size_t count, uint8_t *keys);

/* SHA-256(root || id): the digest of two pieces, for keys made of an engine's hashes. */
void kernel_sha256(const uint8_t *root, size_t root_bytes, const uint8_t *id, size_t id_bytes,
                   uint8_t digest[32]);

/* ---- rows of the index (`proto/index.py`) */

enum { ROW_BYTES = 96, CHECKED_BYTES = 92, MAX_CHAIN = 16, MAX_EXTENTS = 4096, WORDS_PER_ROW = 9 };

/* Offsets in the row of an entry. */
enum {
    GENERATION_OFFSET = 32,
    PAYLOAD_OFFSET = 40,
    OFFSET_OFFSET = 48,
    LENGTH_OFFSET = 56,
    TOKENS_OFFSET = 64,
    CRC_OFFSET = 68,
    IDS_OFFSET = 72,
    LAYERS_OFFSET = 76,
    TIER_OFFSET = 78,
    REASON_OFFSET = 79,
    EXTENTS_OFFSET = 80,
    CONTINUATION_OFFSET = 84,
    CHECKSUM_OFFSET = 88,
    LINK_OFFSET = 92,
};

/* An index in memory that another process writes. `rows` is the number of whole rows in it. */
struct kernel_index {
    const uint8_t *data;
    uint32_t max_heads;
    uint32_t rows;
    uint64_t multiplier[2]; /* low word first */
};

/* The most bytes that a row with its continuation takes. */
enum { LONGEST_ROW_BYTES = CHECKED_BYTES + 16 * (MAX_EXTENTS - 1) };

/* Whether the index is valid: it was not revoked. */
int kernel_index_live(const struct kernel_index *index);

/* The number of the row of `key`, 0 if there is none. The row's bytes go to `row`, which has room
 * for LONGEST_ROW_BYTES, and their number to `row_bytes`. Reads within the index and ends, whatever
 * its content. */
uint32_t kernel_index_find(const struct kernel_index *index, const uint8_t key[32], uint8_t *row,
                           size_t *row_bytes);

/* Whether the row of this number still has this generation. All loads before this call are
 * ordered before its own. */
int kernel_index_stands(const struct kernel_index *index, uint32_t number, uint64_t generation);

/* ---- the writer of the index, which only one thread of one process uses */

/* What it has in hand: `count` heads in use, the chain of free rows, and the rows that were never
 * used, as far as they have memory. */
struct kernel_writer {
    uint8_t *data;
    uint64_t multiplier[2];
    uint32_t count;
    uint32_t rows; /* that lie in `data` */
    uint32_t free_row, fresh_row, secured_row;
    uint64_t shape;
};

enum { PUT_DONE, PUT_OTHERWISE };

/* List the entry of a row of CHECKED_BYTES that has one extent, and is complete but for its
 * checksum. PUT_OTHERWISE: nothing was done, as its key is listed already, its chain is full, or
 * there is no row for it. */
int kernel_index_put(struct kernel_writer *writer, uint8_t *row);

enum { DELETE_DONE, DELETE_ABSENT, DELETE_OTHERWISE };

/* Remove the row of a key. DELETE_OTHERWISE: nothing was done, as it has several rows. */
int kernel_index_delete(struct kernel_writer *writer, const uint8_t key[32]);

/* All changes so far become visible before anything that is stored from now on. */
void kernel_index_published(void);

/* ---- what the processor has */

/* The names of the forms that run here, best first, for checksums and for hashes; NULL ends. */
const char *const *kernel_checksum_forms(void);
const char *const *kernel_hash_forms(void);
/* Use another form than the best one, for tests. Returns 0 if it does not run here. */
int kernel_use_checksum(const char *name);
int kernel_use_hash(const char *name);
const char *kernel_checksum_form(void);
const char *kernel_hash_form(void);

#endif
