/* Weights into panels and out of them.
 *
 * The layout of a ternary panel is made for this: the 16 codes of one row in one block are the four
 * bytes of one 32-bit word. If u0..u3 are the words of its four quads of codes, the packed word is
 * u0 | u1 << 2 | u2 << 4 | u3 << 6. All of it is loops over rows of a panel and blocks of K. */

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "threads.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte of a word is its lowest");

enum { BUFFER_BLOCKS = 64, BUFFER = BUFFER_BLOCKS * BLOCK_K, ONES = 0x01010101 };

struct conversion {
    const struct isa *isa;
    const void *from;
    int from_type;
    void *to;
    int to_type;
    float scale;
    int64_t n, k;
    _Atomic int bad_value;
};

static int each_panel(struct conversion *c, int threads, task_range *run)
{
    threads = threads_for((double)c->n * (double)c->k, threads);
    parallel_for(ceil_div(c->n, PANEL_ROWS), threads, run, c);
    return c->bad_value ? MEGABIT_BAD_VALUE : MEGABIT_OK;
}

/* Word of row r (of the panel) in its first block; a block later it is PACKED_BLOCK further. */
static int64_t word_offset(int64_t r)
{
    return r * QUAD;
}

/* Codes -1, 0, 1 of a row, up to BUFFER of them, to its words of a panel. */
static void pack_row(const struct isa *isa, const int8_t *codes, int64_t count, uint8_t *to)
{
    uint32_t words[BUFFER_BLOCKS];
    int64_t whole = count / BLOCK_K, rest = count % BLOCK_K;
    isa->elementwise.pack_words(codes, whole, words);
    if (rest > 0) {
        int8_t padded[BLOCK_K] = {0};
        memcpy(padded, codes + whole * BLOCK_K, (size_t)rest);
        isa->elementwise.pack_words(padded, 1, words + whole);
    }
    for (int64_t block = 0; block < whole + (rest > 0); block++)
        memcpy(to + PACKED_BLOCK * block, words + block, sizeof *words);
}

/* The words of rows beyond N: zeros, that is code 1. */
static void pad_rows(int64_t first, int64_t blocks, uint8_t *panel)
{
    for (int64_t block = 0; block < blocks; block++, panel += PACKED_BLOCK)
        memset(panel + word_offset(first), 0x55, (size_t)(PACKED_BLOCK - word_offset(first)));
}

static bool are_ternary(const int8_t *codes, int64_t count)
{
    uint8_t bad = 0;
    for (int64_t i = 0; i < count; i++)
        bad |= (uint8_t)(codes[i] + 1) > 2;
    return !bad;
}

/* Codes of a row from k on: those given, or made of the latent weight in `buffer`. */
static const int8_t *codes_from(struct conversion *c, int64_t row, int64_t k, int64_t count,
                                int8_t *buffer)
{
    int64_t at = row * c->k + k;
    if (c->from_type == MEGABIT_FLOAT32) {
        c->isa->elementwise.ternarize((const float *)c->from + at, c->scale, count, buffer);
        return buffer;
    }
    const int8_t *codes = (const int8_t *)c->from + at;
    if (!are_ternary(codes, count))
        atomic_store(&c->bad_value, 1);
    return codes;
}

static void pack_ternary(void *context, int64_t begin, int64_t end)
{
    struct conversion *c = context;
    int64_t blocks = ceil_div(c->k, BLOCK_K);
    int8_t buffer[BUFFER];
    for (int64_t p = begin; p < end; p++) {
        uint8_t *panel = (uint8_t *)c->to + p * blocks * PACKED_BLOCK;
        int64_t rows = smaller(PANEL_ROWS, c->n - p * PANEL_ROWS);
        for (int64_t k = 0; k < c->k; k += BUFFER) { /* all rows, while their lines are in cache */
            int64_t count = smaller(BUFFER, c->k - k);
            uint8_t *words = panel + k / BLOCK_K * PACKED_BLOCK;
            for (int64_t r = 0; r < rows; r++)
                pack_row(c->isa, codes_from(c, p * PANEL_ROWS + r, k, count, buffer), count,
                         words + word_offset(r));
        }
        pad_rows(rows, blocks, panel);
    }
}

/* Codes 0, 1, 2 of a row's words; whole blocks. */
static void unpack_row(const uint8_t *words, int64_t blocks, uint8_t *codes)
{
    for (int64_t block = 0; block < blocks; block++, words += PACKED_BLOCK) {
        uint32_t word, quad[QUADS_PER_BLOCK];
        memcpy(&word, words, sizeof word);
        for (int plane = 0; plane < QUADS_PER_BLOCK; plane++)
            quad[plane] = word >> 2 * plane & 3 * ONES;
        memcpy(codes + block * BLOCK_K, quad, sizeof quad);
    }
}

static void unpack_panels(void *context, int64_t begin, int64_t end)
{
    struct conversion *c = context;
    const struct elementwise *elementwise = &c->isa->elementwise;
    int64_t blocks = ceil_div(c->k, BLOCK_K);
    uint8_t codes[BUFFER];
    for (int64_t p = begin; p < end; p++) {
        const uint8_t *panel = (const uint8_t *)c->from + p * blocks * PACKED_BLOCK;
        int64_t rows = smaller(PANEL_ROWS, c->n - p * PANEL_ROWS);
        for (int64_t k = 0; k < c->k; k += BUFFER) {
            int64_t count = smaller(BUFFER, c->k - k);
            const uint8_t *words = panel + k / BLOCK_K * PACKED_BLOCK;
            for (int64_t r = 0; r < rows; r++) {
                int64_t at = (p * PANEL_ROWS + r) * c->k + k;
                unpack_row(words + word_offset(r), ceil_div(count, BLOCK_K), codes);
                if (c->to_type == MEGABIT_INT8)
                    elementwise->widen_int8(codes, count, (int8_t *)c->to + at);
                else if (c->to_type == MEGABIT_FLOAT32)
                    elementwise->widen_float32(codes, count, (float *)c->to + at);
                else
                    elementwise->widen_bfloat16(codes, count, (uint16_t *)c->to + at);
            }
        }
    }
}

static void pack_int8(void *context, int64_t begin, int64_t end)
{
    struct conversion *c = context;
    int64_t blocks = ceil_div(c->k, BLOCK_K);
    for (int64_t p = begin; p < end; p++) {
        uint8_t *panel = (uint8_t *)c->to + p * blocks * BYTE_BLOCK;
        int64_t rows = smaller(PANEL_ROWS, c->n - p * PANEL_ROWS);
        memset(panel, 128, (size_t)(blocks * BYTE_BLOCK));
        for (int64_t quad = 0; quad < ceil_div(c->k, QUAD); quad++)
            for (int64_t r = 0; r < rows; r++) {
                const int8_t *w = (const int8_t *)c->from + (p * PANEL_ROWS + r) * c->k;
                for (int64_t i = 0; i < smaller(QUAD, c->k - quad * QUAD); i++) {
                    int8_t value = w[quad * QUAD + i];
                    if (value == -128)
                        atomic_store(&c->bad_value, 1);
                    panel[quad * QUAD_BYTES + r * QUAD + i] = (uint8_t)(value + 128);
                }
            }
    }
}

int megabit_ternarize_panels(const struct isa *isa, const float *weight, float scale,
                             uint8_t *panels, int64_t n, int64_t k, int threads)
{
    struct conversion c = {.isa = isa,
                           .from = weight,
                           .from_type = MEGABIT_FLOAT32,
                           .to = panels,
                           .scale = scale,
                           .n = n,
                           .k = k};
    return each_panel(&c, threads, pack_ternary);
}

static void ternarize_range(void *context, int64_t begin, int64_t end)
{
    struct conversion *c = context;
    c->isa->elementwise.ternarize((const float *)c->from + begin, c->scale, end - begin,
                                  (int8_t *)c->to + begin);
}

int megabit_ternarize_codes(const struct isa *isa, const float *weight, float scale, int8_t *codes,
                            int64_t count, int threads)
{
    struct conversion c = {.isa = isa, .from = weight, .to = codes, .scale = scale};
    parallel_for(count, threads_for((double)count, threads), ternarize_range, &c);
    return MEGABIT_OK;
}

int megabit_pack_panels(const struct isa *isa, const int8_t *codes, uint8_t *panels, int64_t n,
                        int64_t k, int threads)
{
    struct conversion c = {
        .isa = isa, .from = codes, .from_type = MEGABIT_INT8, .to = panels, .n = n, .k = k};
    return each_panel(&c, threads, pack_ternary);
}

int megabit_pack_int8(const struct isa *isa, const int8_t *weight, uint8_t *panels, int64_t n,
                      int64_t k, int threads)
{
    struct conversion c = {.isa = isa, .from = weight, .to = panels, .n = n, .k = k};
    return each_panel(&c, threads, pack_int8);
}

int megabit_unpack_panels(const struct isa *isa, const uint8_t *panels, void *out, int out_type,
                          int64_t n, int64_t k, int threads)
{
    struct conversion c = {
        .isa = isa, .from = panels, .to = out, .to_type = out_type, .n = n, .k = k};
    return each_panel(&c, threads, unpack_panels);
}
