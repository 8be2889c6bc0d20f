/* AVX-512 with bfloat16: vdpbf16ps multiplies 32 pairs and adds neighbours to 16 sums. The rest is
 * that of avx512vnni.
 *
 * Lane i of an element has k = 2 i and 2 i + 1 of every 32, and the lanes are added as sum_of_word
 * adds them; what K lacks to 32 are zeros. So the bits do not depend on the tile. Sums are rounded
 * to nearest, and numbers below 2^-126 count as zero: the instruction knows nothing else. */

#include "avx512vnni.h"
#include "elementwise.h"
#include "float_tiles.h"

enum {
    PAIRS = 32,     /* numbers in a vector, one of each pair in either operand */
    DENSE_ROWS = 6, /* 24 sums, four vectors of w and one of x leave three registers */
    DENSE_COLUMNS = 4,
    ROW_GROUP = 4, /* rows whose sums fill one vector */
};

/* Two parts of the lanes of a and b, as `shuffle` picks them, added. */
#define ADDED(shuffle, a, b, first, second)                                                        \
    _mm512_add_ps(shuffle(a, b, first), shuffle(a, b, second))

/* sum_of_word of up to four rows of four words: lane 4 r + n is the sum of acc[r][n]. */
INLINE __m512 sums_of_words(int rows, __m512 acc[ROW_GROUP][DENSE_COLUMNS])
{
    __m512 column[DENSE_COLUMNS];
    UNROLLED(n, DENSE_COLUMNS) {
        __m512 low = ADDED(_mm512_shuffle_f32x4, acc[0][n], acc[1][n], 0x44, 0xee);
        __m512 high = rows <= 2 ? _mm512_setzero_ps()
                                : ADDED(_mm512_shuffle_f32x4, acc[2][n], acc[3][n], 0x44, 0xee);
        column[n] = ADDED(_mm512_shuffle_f32x4, low, high, 0x88, 0xdd);
    }
    __m512 low = ADDED(_mm512_shuffle_ps, column[0], column[1], 0x44, 0xee);
    __m512 high = ADDED(_mm512_shuffle_ps, column[2], column[3], 0x44, 0xee);
    return ADDED(_mm512_shuffle_ps, low, high, 0x88, 0xdd);
}

/* The first `count` of 32 numbers, and zeros. */
INLINE __m512bh load_pairs(int64_t count, const uint16_t *from)
{
    if (count == PAIRS)
        return (__m512bh)_mm512_loadu_si512(from);
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1u << count) - 1), from);
}

INLINE void multiply_pairs(int rows, int columns, int64_t count, const uint16_t *x,
                           const uint16_t *w, int64_t k, __m512 acc[][DENSE_COLUMNS])
{
    __m512bh values[DENSE_COLUMNS];
    UNROLLED(n, columns) {
        values[n] = load_pairs(count, w + n * k);
        /* For few rows of x, weights come from memory: the next tile's are on their way. */
        if (rows < DENSE_ROWS)
            _mm_prefetch((const char *)(w + (n + DENSE_COLUMNS) * k), _MM_HINT_T0);
    }
    UNROLLED(r, rows) {
        __m512bh factor = load_pairs(count, x + r * k);
        UNROLLED(n, columns)
            acc[r][n] = _mm512_dpbf16_ps(acc[r][n], factor, values[n]);
    }
}

INLINE void dense_tile(int rows, int columns, const uint16_t *x, const uint16_t *w, int64_t k,
                       uint16_t *out, int64_t out_stride)
{
    enum { MOST = (DENSE_ROWS + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP };
    __m512 acc[MOST][DENSE_COLUMNS];
    UNROLLED(r, MOST)
        UNROLLED(n, DENSE_COLUMNS)
            acc[r][n] = _mm512_setzero_ps();
    int64_t at = 0;
    for (; at + PAIRS <= k; at += PAIRS)
        multiply_pairs(rows, columns, PAIRS, x + at, w + at, k, acc);
    if (at < k)
        multiply_pairs(rows, columns, k - at, x + at, w + at, k, acc);
    UNROLLED(group, (rows + ROW_GROUP - 1) / ROW_GROUP) {
        const int first = ROW_GROUP * group,
                  own = rows - first < ROW_GROUP ? rows - first : ROW_GROUP;
        __m256bh sums = _mm512_cvtneps_pbh(sums_of_words(own, acc + first));
        uint16_t rounded[WORD];
        memcpy(rounded, &sums, sizeof rounded);
        UNROLLED(r, own)
            memcpy(out + (first + r) * out_stride, rounded + DENSE_COLUMNS * r,
                   sizeof *rounded * (size_t)columns);
    }
}

INLINE void dense_rows(int rows, const uint16_t *x, const uint16_t *w, int64_t n, int64_t k,
                       uint16_t *out, int64_t out_stride)
{
    int64_t column = 0;
    for (; column + DENSE_COLUMNS <= n; column += DENSE_COLUMNS)
        dense_tile(rows, DENSE_COLUMNS, x, w + column * k, k, out + column, out_stride);
    for (; column < n; column++)
        dense_tile(rows, 1, x, w + column * k, k, out + column, out_stride);
}

/* The number of rows must be a constant for the sums to live in registers. */
static void bfloat16_product(const uint16_t *x, const uint16_t *w, int64_t rows, int64_t n,
                             int64_t k, uint16_t *out, int64_t out_stride)
{
    for (; rows >= DENSE_ROWS; rows -= DENSE_ROWS) {
        dense_rows(DENSE_ROWS, x, w, n, k, out, out_stride);
        x += DENSE_ROWS * k;
        out += DENSE_ROWS * out_stride;
    }
    switch (rows) {
    case 1: dense_rows(1, x, w, n, k, out, out_stride); break;
    case 2: dense_rows(2, x, w, n, k, out, out_stride); break;
    case 3: dense_rows(3, x, w, n, k, out, out_stride); break;
    case 4: dense_rows(4, x, w, n, k, out, out_stride); break;
    case 5: dense_rows(5, x, w, n, k, out, out_stride); break;
    default: break;
    }
}

const struct isa isa_avx512bf16 = {
    .name = "avx512bf16",
    .micro = AVX512VNNI,
    .elementwise = ELEMENTWISE,
    .floats = FLOAT_KERNELS,
    .bfloat16_product = bfloat16_product,
};
