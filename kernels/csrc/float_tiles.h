/* Floating-point microkernels, in terms of floats.h. Each isa_*.c includes them and gets them in
 * its own vectors. */
#ifndef MEGABIT_FLOAT_TILES_H
#define MEGABIT_FLOAT_TILES_H

#include <string.h>

#include "floats.h"

/* Weights of one row of scores, in place: e^(x - largest), x = score * scale. What lies behind, up
 * to the next word, becomes zero. Returns their sum. */
static float softmax_row(float *row, int64_t count, float scale, float *largest)
{
    int64_t padded = ceil_div(count, WORD) * WORD;
    const float infinity = __builtin_inff();
    for (int64_t i = count; i < padded; i++)
        row[i] = -infinity;
    floats most[WORD_VECTORS], sum[WORD_VECTORS];
    UNROLLED(v, WORD_VECTORS) {
        most[v] = all_lanes(-infinity);
        sum[v] = all_lanes(0.0f);
    }
    for (int64_t i = 0; i < padded; i += WORD)
        UNROLLED(v, WORD_VECTORS) {
            floats x = load_floats(row + i + FLOAT_LANES * v) * scale;
            store_floats(row + i + FLOAT_LANES * v, x);
            most[v] = chosen((ints)(x > most[v]), x, most[v]);
        }
    float lanes[WORD];
    memcpy(lanes, most, sizeof lanes);
    *largest = -infinity;
    for (int i = 0; i < WORD; i++)
        *largest = lanes[i] > *largest ? lanes[i] : *largest;
    for (int64_t i = 0; i < padded; i += WORD)
        UNROLLED(v, WORD_VECTORS) {
            floats weight = exponential(load_floats(row + i + FLOAT_LANES * v) - *largest);
            store_floats(row + i + FLOAT_LANES * v, weight);
            sum[v] += weight;
        }
    return sum_of_word(sum);
}

/* c[r][i] += the sum over k, in order, of a[r][k] * b[k][i], for so many words i. */
INLINE void outer_tile_of(int rows, int words, const float *a, int64_t a_stride,
                          const float *const *b, int64_t b_stride, int64_t count, float *c,
                          int64_t c_stride)
{
    enum { MOST = WORD_TILE * WORD_VECTORS };
    const int vectors = words * WORD_VECTORS;
    floats acc[ROW_TILE][MOST];
    const float *from[WORD_TILE];
    UNROLLED(w, words)
        from[w] = b[w];
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            acc[r][v] = load_floats(c + r * c_stride + FLOAT_LANES * v);
    for (int64_t k = 0; k < count; k++) {
        floats values[MOST];
        UNROLLED(w, words) {
            UNROLLED(v, WORD_VECTORS)
                values[w * WORD_VECTORS + v] = load_floats(from[w] + FLOAT_LANES * v);
            from[w] += b_stride;
        }
        UNROLLED(r, rows) {
            floats factor = all_lanes(a[r * a_stride + k]);
            UNROLLED(v, vectors)
                acc[r][v] = multiply_add(factor, values[v], acc[r][v]);
        }
    }
    UNROLLED(r, rows)
        UNROLLED(v, vectors)
            store_floats(c + r * c_stride + FLOAT_LANES * v, acc[r][v]);
}

INLINE void outer_rows(int rows, int64_t words, const float *a, int64_t a_stride,
                       const float *const *b, int64_t b_stride, int64_t count, float *c,
                       int64_t c_stride)
{
    for (; words >= WORD_TILE; words -= WORD_TILE, b += WORD_TILE, c += WORD * WORD_TILE)
        outer_tile_of(rows, WORD_TILE, a, a_stride, b, b_stride, count, c, c_stride);
    for (; words > 0; words--, b++, c += WORD)
        outer_tile_of(rows, 1, a, a_stride, b, b_stride, count, c, c_stride);
}

/* The number of rows must be a constant for the sums to live in registers. */
static void outer_tile(int rows, int64_t words, const float *a, int64_t a_stride,
                       const float *const *b, int64_t b_stride, int64_t count, float *c,
                       int64_t c_stride)
{
    switch (rows) {
    case 1: outer_rows(1, words, a, a_stride, b, b_stride, count, c, c_stride); break;
#if defined(__AVX__) || defined(__aarch64__)
    case 2: outer_rows(2, words, a, a_stride, b, b_stride, count, c, c_stride); break;
    case 3: outer_rows(3, words, a, a_stride, b, b_stride, count, c, c_stride); break;
    case 4: outer_rows(4, words, a, a_stride, b, b_stride, count, c, c_stride); break;
    case 5: outer_rows(5, words, a, a_stride, b, b_stride, count, c, c_stride); break;
#endif
    default: outer_rows(ROW_TILE, words, a, a_stride, b, b_stride, count, c, c_stride); break;
    }
}

/* Dot products of rows of x, whole words of floats, with rows of W of a type. */
INLINE void dot_tile_of(int type, int rows, int columns, const float *x, int64_t x_stride,
                        const void *weight, int64_t k, float *out, int64_t out_stride)
{
    const int64_t size = type == MEGABIT_FLOAT32 ? 4 : 2;
    floats acc[DOT_SUMS][WORD_VECTORS];
    UNROLLED(i, rows * columns)
        UNROLLED(v, WORD_VECTORS)
            acc[i][v] = all_lanes(0.0f);
    const char *w[DOT_COLUMNS];
    UNROLLED(n, columns)
        w[n] = (const char *)weight + n * size * k;
    int64_t at = 0;
    for (; at + WORD <= k; at += WORD)
        UNROLLED(v, WORD_VECTORS) {
            floats values[DOT_COLUMNS];
            UNROLLED(n, columns)
                values[n] = load_as(type, w[n] + size * (at + FLOAT_LANES * v));
            UNROLLED(r, rows) {
                floats factor = load_floats(x + r * x_stride + at + FLOAT_LANES * v);
                UNROLLED(n, columns)
                    acc[r * columns + n][v] =
                        multiply_add(factor, values[n], acc[r * columns + n][v]);
            }
        }
    if (at < k)
        UNROLLED(n, columns) {
            float last[WORD] = {0}; /* as x is filled up */
            for (int64_t i = at; i < k; i++)
                last[i - at] = widened_as(type, w[n], i);
            UNROLLED(r, rows)
                UNROLLED(v, WORD_VECTORS)
                    acc[r * columns + n][v] =
                        multiply_add(load_floats(x + r * x_stride + at + FLOAT_LANES * v),
                                     load_floats(last + FLOAT_LANES * v), acc[r * columns + n][v]);
        }
    float sums[DOT_SUMS];
    UNROLLED(i, rows * columns / 4)
        sums_of_four(acc + 4 * i, sums + 4 * i);
    for (int i = rows * columns / 4 * 4; i < rows * columns; i++)
        sums[i] = sum_of_word(acc[i]);
    UNROLLED(r, rows)
        UNROLLED(n, columns)
            out[r * out_stride + n] = sums[r * columns + n];
}

INLINE void dot_columns(int type, int rows, const float *x, int64_t x_stride, const void *weight,
                        int64_t n, int64_t k, float *out, int64_t out_stride)
{
    const int64_t size = type == MEGABIT_FLOAT32 ? 4 : 2;
    const char *w = weight;
    int64_t column = 0;
    for (; column + DOT_COLUMNS <= n; column += DOT_COLUMNS)
        dot_tile_of(type, rows, DOT_COLUMNS, x, x_stride, w + size * k * column, k, out + column,
                    out_stride);
    for (; column < n; column++)
        dot_tile_of(type, rows, 1, x, x_stride, w + size * k * column, k, out + column, out_stride);
}

INLINE void dot_rows(int type, int rows, const float *x, int64_t x_stride, const void *weight,
                     int64_t n, int64_t k, float *out, int64_t out_stride)
{
    switch (rows) {
    case 1: dot_columns(type, 1, x, x_stride, weight, n, k, out, out_stride); break;
#if defined(__AVX__) || defined(__aarch64__)
    case 2: dot_columns(type, 2, x, x_stride, weight, n, k, out, out_stride); break;
#if defined(__AVX512F__)
    case 3: dot_columns(type, 3, x, x_stride, weight, n, k, out, out_stride); break;
    case 4: dot_columns(type, 4, x, x_stride, weight, n, k, out, out_stride); break;
    case 5: dot_columns(type, 5, x, x_stride, weight, n, k, out, out_stride); break;
#endif
#endif
    default: dot_columns(type, DOT_ROWS, x, x_stride, weight, n, k, out, out_stride); break;
    }
}

/* `rows` of x, filled up to whole words with zeros, with n rows of W in float32 or bfloat16. */
static void dot_tile(int rows, const float *x, int64_t x_stride, const void *weight, int type,
                     int64_t n, int64_t k, float *out, int64_t out_stride)
{
    if (type == MEGABIT_FLOAT32)
        dot_rows(MEGABIT_FLOAT32, rows, x, x_stride, weight, n, k, out, out_stride);
    else
        dot_rows(MEGABIT_BFLOAT16, rows, x, x_stride, weight, n, k, out, out_stride);
}

#define FLOAT_KERNELS                                                                              \
    {                                                                                              \
        ROW_TILE, DOT_ROWS, outer_tile, softmax_row, dot_tile, widen_rows, narrow_row, scale_row   \
    }

#endif
