/* The transpose of a matrix into int8 panels, for products that sum over its rows: four rows are
 * side by side in a quad, so nothing moves further than to its neighbours.
 *
 * The ternary panels of W have, of one row n, the 16 codes of a block in one word; four rows are 16
 * bytes, and turned as 4 x 4 bytes they are, plane by plane, 64 bytes of a quad of the transpose.
 */

#include <stdatomic.h>
#include <string.h>

#include "isa.h"
#include "threads.h"

enum { ZERO = 128, PANEL_BLOCKS = PANEL_ROWS / BLOCK_K };

struct transposition {
    const struct isa *isa;
    const void *from; /* [n, k] */
    uint8_t *to;      /* panels of [k, n] */
    int64_t n, k;
    _Atomic int bad_value;
};

static uint8_t *quad_of(const struct transposition *t, int64_t panel, int64_t quad)
{
    return t->to + (panel * ceil_div(t->n, BLOCK_K) * QUADS_PER_BLOCK + quad) * QUAD_BYTES;
}

static void interleave_rows(void *context, int64_t begin, int64_t end)
{
    struct transposition *t = context;
    int32_t bad = 0;
    for (int64_t quad = 0; quad < ceil_div(t->n, BLOCK_K) * QUADS_PER_BLOCK; quad++)
        for (int64_t panel = begin; panel < end; panel++) {
            const int8_t zeros[PANEL_ROWS] = {0}, *row[QUAD];
            int8_t padded[QUAD][PANEL_ROWS];
            int64_t first = panel * PANEL_ROWS, count = smaller(PANEL_ROWS, t->k - first);
            UNROLLED(i, QUAD) {
                int64_t n = quad * QUAD + i;
                row[i] = n < t->n ? (const int8_t *)t->from + n * t->k + first : zeros;
                if (n < t->n && count < PANEL_ROWS) {
                    memset(padded[i], 0, PANEL_ROWS);
                    row[i] = memcpy(padded[i], row[i], (size_t)count);
                }
            }
            bad |= t->isa->elementwise.interleave(row[0], row[1], row[2], row[3],
                                                  quad_of(t, panel, quad));
        }
    if (bad)
        atomic_store(&t->bad_value, 1);
}

int megabit_pack_int8_transposed(const struct isa *isa, const int8_t *weight, uint8_t *panels,
                                 int64_t n, int64_t k, int threads)
{
    struct transposition t = {.isa = isa, .from = weight, .to = panels, .n = n, .k = k};
    threads = threads_for((double)n * (double)k, threads);
    parallel_for(ceil_div(k, PANEL_ROWS), threads, interleave_rows, &t);
    return t.bad_value ? MEGABIT_BAD_VALUE : MEGABIT_OK;
}

/* The blocks of four rows of a ternary panel that make one panel of the transpose. */
static void turn_panels(void *context, int64_t begin, int64_t end)
{
    const struct transposition *t = context;
    int64_t blocks = ceil_div(t->k, BLOCK_K), quads = ceil_div(t->n, BLOCK_K) * QUADS_PER_BLOCK;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t first = 0; first < quads; first += PANEL_ROWS / QUAD) {
            const uint8_t *from =
                (const uint8_t *)t->from +
                (first * QUAD / PANEL_ROWS * blocks + panel * PANEL_BLOCKS) * PACKED_BLOCK;
            int64_t count = smaller(PANEL_ROWS / QUAD, quads - first);
            for (int64_t block = 0; block < PANEL_BLOCKS; block++, from += PACKED_BLOCK) {
                uint8_t *to = quad_of(t, panel, first) + block * BLOCK_K * QUAD;
                if (panel * PANEL_BLOCKS + block < blocks)
                    t->isa->elementwise.turn_block(from, count, to);
                else
                    for (int64_t quad = 0; quad < count; quad++)
                        memset(to + quad * QUAD_BYTES, ZERO, BLOCK_K * QUAD);
            }
        }
}

int megabit_transpose_panels(const struct isa *isa, const uint8_t *from, uint8_t *to, int64_t n,
                             int64_t k, int threads)
{
    struct transposition t = {.isa = isa, .from = from, .to = to, .n = n, .k = k};
    threads = threads_for((double)n * (double)k, threads);
    parallel_for(ceil_div(k, PANEL_ROWS), threads, turn_panels, &t);
    return MEGABIT_OK;
}
