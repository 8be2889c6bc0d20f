/* Where the data is while it is multiplied, from the inside out:
 *
 *   registers  a tile of x (up to tile_rows) times a panel (64 rows of W)
 *   L1         CHUNK_BLOCKS of one panel (8 KiB packed, 32 KiB unpacked), which all tiles of a
 * group read in turn L2         the same part of a group of tiles, read as one stream, and the sums
 * of the group L3         up to ACTIVATION_BYTES of x, rearranged in tiles, which all threads share
 *
 * A task is one panel with one group of tiles. Weights come from DRAM or L3 once for each group. */

#include "product.h"

#include <stdatomic.h>
#include <string.h>

#include "scratch.h"
#include "threads.h"

static const int64_t GROUP_ROWS = 192; /* 48 KiB of sums */
static const int64_t ACTIVATION_BYTES = 4 << 20;

/* Some rows of x in tiles: [chunk][tile][block][row][16], each chunk of K one after the other. The
 * rows are spread evenly over as few tiles as will hold them. */
struct activations {
    const struct product *product;
    int64_t first_row, rows;
    int64_t tiles;
    int64_t groups; /* of tiles */
    int8_t *data;
    int32_t *sums; /* of each row */
    _Atomic int out_of_memory;
};

int64_t panels_of(const struct product *product)
{
    return ceil_div(product->n, PANEL_ROWS);
}

/* First row of a tile, counted from first_row. */
static int64_t row_of_tile(const struct activations *a, int64_t tile)
{
    return a->rows * tile / a->tiles;
}

/* A tile's part of the chunk of so many blocks that begins at first_block. */
static int8_t *part_of_tile(const struct activations *a, int64_t tile, int64_t first_block,
                            int64_t blocks)
{
    return a->data + BLOCK_K * (first_block * a->rows + blocks * row_of_tile(a, tile));
}

/* One row of x, a block to every `stride` bytes from `out` on; what lies beyond K is zero. */
static void spread_blocks(const int8_t *x, int64_t k, int64_t blocks, int64_t stride, int8_t *out)
{
    int64_t whole = smaller(blocks, k / BLOCK_K);
    for (int64_t block = 0; block < whole; block++, x += BLOCK_K, out += stride)
        memcpy(out, x, BLOCK_K);
    if (whole < blocks) {
        memset(out, 0, BLOCK_K);
        memcpy(out, x, (size_t)(k % BLOCK_K));
    }
}

static void arrange_tiles(void *context, int64_t begin, int64_t end)
{
    struct activations *a = context;
    const struct product *product = a->product;
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t start = row_of_tile(a, tile), stop = row_of_tile(a, tile + 1);
        for (int64_t row = start; row < stop; row++) {
            const int8_t *x = product->x + (a->first_row + row) * product->k;
            a->sums[row] = product->isa->elementwise.sum(x, product->k);
            for (int64_t block = 0; block < product->blocks; block += CHUNK_BLOCKS) {
                int64_t blocks = smaller(CHUNK_BLOCKS, product->blocks - block);
                spread_blocks(x + block * BLOCK_K, product->k - block * BLOCK_K, blocks,
                              BLOCK_K * (stop - start),
                              part_of_tile(a, tile, block, blocks) + BLOCK_K * (row - start));
            }
        }
    }
}

static int64_t element_bytes(const struct product *product)
{
    return product->out_type == MEGABIT_BFLOAT16 ? 2 : 4;
}

/* Fetches the lines that the results of some rows will be written to: they come from memory, and
 * are there when the last chunk has been multiplied. */
static void prefetch_results(const struct product *product, int64_t first_row, int64_t last_row,
                             int64_t panel)
{
    const int64_t line = 64, bytes = element_bytes(product);
    for (int64_t row = first_row; row < last_row; row++) {
        const char *out =
            (const char *)product->out + bytes * (row * product->n + panel * PANEL_ROWS);
        for (int64_t at = 0; at < bytes * PANEL_ROWS; at += line)
            __builtin_prefetch(out + at, 1);
    }
}

/* One panel with the tiles of one group. */
static void multiply_group(const struct activations *a, int64_t panel, int64_t group,
                           uint8_t *codes, int32_t *sums)
{
    const struct product *product = a->product;
    int64_t first_tile = a->tiles * group / a->groups;
    int64_t last_tile = a->tiles * (group + 1) / a->groups;
    int64_t start = row_of_tile(a, first_tile), stop = row_of_tile(a, last_tile);
    const uint8_t *weights = product->panels + panel * product->blocks * product->block_bytes;

    memset(sums, 0, sizeof *sums * PANEL_ROWS * (size_t)(stop - start));
    for (int64_t block = 0; block < product->blocks; block += CHUNK_BLOCKS) {
        int64_t blocks = smaller(CHUNK_BLOCKS, product->blocks - block);
        bool is_last = block + blocks == product->blocks;
        const uint8_t *w = weights + block * product->block_bytes;
        if (product->unpack != NULL) {
            product->unpack(w, blocks, codes);
            w = codes;
        }
        for (int64_t tile = first_tile; tile < last_tile; tile++) {
            int64_t row = row_of_tile(a, tile), next = row_of_tile(a, tile + 1);
            if (is_last)
                prefetch_results(product, a->first_row + row, a->first_row + next, panel);
            product->tile(w, part_of_tile(a, tile, block, blocks), blocks, (int)(next - row),
                          sums + PANEL_ROWS * (row - start));
        }
    }
    for (int64_t row = start; row < stop; row++)
        store_sums(product, a->first_row + row, panel, a->sums[row],
                   sums + PANEL_ROWS * (row - start));
}

static void multiply_groups(void *context, int64_t begin, int64_t end)
{
    struct activations *a = context;
    int64_t most_rows = ceil_div(a->tiles, a->groups) * a->product->isa->micro.tile_rows;
    uint8_t *codes = scratch(SCRATCH_WEIGHTS, (size_t)(CHUNK_BLOCKS * BYTE_BLOCK));
    int32_t *sums = scratch(SCRATCH_SUMS, sizeof *sums * PANEL_ROWS * (size_t)most_rows);
    if (codes == NULL || sums == NULL) {
        atomic_store(&a->out_of_memory, 1);
        return;
    }
    int64_t panels = panels_of(a->product);
    for (int64_t task = begin; task < end; task++)
        multiply_group(a, task % panels, task / panels, codes, sums);
}

int multiply_tiles(const struct product *product)
{
    int64_t tile_rows = product->isa->micro.tile_rows, row_bytes = product->blocks * BLOCK_K;
    int64_t most_rows = row_bytes > 0 ? ACTIVATION_BYTES / row_bytes : product->m;
    most_rows = most_rows < tile_rows ? tile_rows : most_rows;
    int threads =
        threads_for((double)product->m * (double)product->n * (double)product->k, product->threads);

    for (int64_t row = 0; row < product->m; row += most_rows) {
        int64_t rows = smaller(most_rows, product->m - row);
        int64_t tiles = ceil_div(rows, tile_rows);
        struct activations a = {
            .product = product,
            .first_row = row,
            .rows = rows,
            .tiles = tiles,
            .groups = ceil_div(rows, GROUP_ROWS),
        };
        size_t sum_bytes = sizeof *a.sums * (size_t)ceil_div(rows, 16) * 16;
        a.sums = scratch(SCRATCH_ACTIVATIONS, sum_bytes + (size_t)(rows * row_bytes));
        if (a.sums == NULL)
            return MEGABIT_NO_MEMORY;
        a.data = (int8_t *)a.sums + sum_bytes;
        parallel_for(a.tiles, threads, arrange_tiles, &a);
        parallel_for(panels_of(product) * a.groups, threads, multiply_groups, &a);
        if (a.out_of_memory)
            return MEGABIT_NO_MEMORY;
    }
    return MEGABIT_OK;
}

void store_sums(const struct product *product, int64_t row, int64_t panel, int32_t x_sum,
                const int32_t *sum)
{
    const struct elementwise *elementwise = &product->isa->elementwise;
    int64_t first = panel * PANEL_ROWS, count = smaller(PANEL_ROWS, product->n - first);
    int64_t at = row * product->n + first;
    int32_t offset = (int32_t)((uint32_t)product->w_offset * (uint32_t)x_sum);
    if (product->out_type == MEGABIT_INT32) {
        elementwise->store_int32(sum, offset, count, (int32_t *)product->out + at);
        return;
    }
    float x_scale = product->x_scale[row];
    const float *w_scale = product->w_scale + panel * product->w_scale_step;
    if (product->out_type == MEGABIT_FLOAT32)
        elementwise->store_float32(sum, offset, x_scale, w_scale, count,
                                   (float *)product->out + at);
    else
        elementwise->store_bfloat16(sum, offset, x_scale, w_scale, count,
                                    (uint16_t *)product->out + at);
}
