/* The C interface of the CPU kernels. It knows nothing of torch or Python.
 *
 * Matrices are row-major and contiguous. A weight W [N, K] is held in panels of 64 rows, padded
 * with weights of zero:
 *
 *   ternary panels  uint8 [ceil(N/64)][ceil(K/16)][4][64]
 *       byte 4r + i of sub-panel s in block q of panel p holds, of row n = 64p + 16s + r, the four
 *       codes (w + 1) of k = 16q + 4*plane + i, in bits 2*plane and 2*plane + 1
 *   int8 panels     uint8 [ceil(N/64)][4 * ceil(K/16)][64][4]
 *       entry (p, q, r, i) holds w + 128 of row n = 64p + r and k = 4q + i; w is -127 to 127
 *
 * Each function takes the instruction set to use and the number of threads. Integer sums are exact
 * for K up to 131072. Sizes may be zero. The result is one of enum megabit_status.
 */
#ifndef MEGABIT_KERNELS_H
#define MEGABIT_KERNELS_H

#include <stdint.h>

#define MEGABIT_API __attribute__((visibility("default")))

/* Raised together with ABI of native_abi.py when a signature or a layout changes. */
enum { MEGABIT_ABI = 4 };

enum megabit_status { MEGABIT_OK = 0, MEGABIT_NO_MEMORY = 1, MEGABIT_BAD_VALUE = 2 };

enum megabit_type {
    MEGABIT_INT32 = 0,
    MEGABIT_FLOAT32 = 1,
    MEGABIT_BFLOAT16 = 2,
    MEGABIT_INT8 = 3,
    MEGABIT_FLOAT16 = 4,
};

struct isa;

/* A KV cache, as paged.py describes it: keys [blocks][kv_heads][head_dim][block_size], values
 * [blocks][kv_heads][block_size][head_dim] in one type; of int8 with scales
 * [blocks][kv_heads][block_size], else NULL. */
struct megabit_pages {
    void *keys, *values;
    float *key_scale, *value_scale;
    int64_t blocks, kv_heads, head_dim, block_size;
    int32_t type;
};

MEGABIT_API int megabit_abi(void);

/* The instruction sets that this machine has, best first: number 0, 1, ...; then NULL. */
MEGABIT_API const struct isa *megabit_isa(int number);
MEGABIT_API const char *megabit_isa_name(const struct isa *isa);

/* x [M, K] times a ternary W: out [M, N] holds acc as int32 if x_scale is NULL, else
 * acc * (x_scale[m] * w_scale) as float32 or bfloat16. */
MEGABIT_API int megabit_ternary_product(const struct isa *isa, const int8_t *x,
                                        const uint8_t *panels, void *out, int out_type, int64_t m,
                                        int64_t n, int64_t k, const float *x_scale, float w_scale,
                                        int threads);

/* The same for an int8 W with one scale for each row: acc * (x_scale[m] * w_scale[n]). */
MEGABIT_API int megabit_int8_product(const struct isa *isa, const int8_t *x, const uint8_t *panels,
                                     void *out, int out_type, int64_t m, int64_t n, int64_t k,
                                     const float *x_scale, const float *w_scale, int threads);

/* x [M, K] (float32, bfloat16) to int8 under scale[m] = max(absmax[m], 1e-5) / 127. absmax may be
 * NULL; it is then taken from x. A quotient that is NaN becomes 0. */
MEGABIT_API int megabit_quantize_activation(const struct isa *isa, const void *x, int x_type,
                                            const float *absmax, int8_t *x_q, float *scale,
                                            int64_t m, int64_t k, int threads);

/* numerics.fixed_point_abs_sum: lanes[2] count x in so many units to one, which are powers of two;
 * 0 and 2^49 if there is NaN or a magnitude from 2^16 on. */
MEGABIT_API int megabit_abs_sum(const struct isa *isa, const float *x, int64_t count,
                                double small_units, double large_units, int64_t *lanes,
                                int threads);

/* numerics.fixed_point_square_sum: the sum of (x * shrink)^2 in so many units to one. */
MEGABIT_API int megabit_square_sum(const struct isa *isa, const float *x, int64_t count,
                                   double shrink, double units, int64_t *total, int threads);

/* clamp(round(W / scale), -1, 1), NaN as 0, into ternary panels or plain int8. */
MEGABIT_API int megabit_ternarize_panels(const struct isa *isa, const float *weight, float scale,
                                         uint8_t *panels, int64_t n, int64_t k, int threads);
MEGABIT_API int megabit_ternarize_codes(const struct isa *isa, const float *weight, float scale,
                                        int8_t *codes, int64_t count, int threads);

/* x [M, N] to int8 by stochastic rounding (stochastic.py), with a scale for each row. */
MEGABIT_API int megabit_round_rows(const struct isa *isa, const float *x, uint64_t key, int8_t *x_q,
                                   float *scale, int64_t m, int64_t n, int threads);
/* x [M, N] times x_scale [M], with a scale for each column: x_q is the transpose, [N, M]. */
MEGABIT_API int megabit_round_columns(const struct isa *isa, const float *x, const float *x_scale,
                                      uint64_t key, int8_t *x_q, float *scale, int64_t m, int64_t n,
                                      int threads);

/* int8 panels of the transpose [K, N] of an int8 matrix [N, K], or of one in ternary panels;
 * MEGABIT_BAD_VALUE if there is -128. */
MEGABIT_API int megabit_pack_int8_transposed(const struct isa *isa, const int8_t *weight,
                                             uint8_t *panels, int64_t n, int64_t k, int threads);
MEGABIT_API int megabit_transpose_panels(const struct isa *isa, const uint8_t *from, uint8_t *to,
                                         int64_t n, int64_t k, int threads);

/* int8 weights into panels; MEGABIT_BAD_VALUE if one is out of range. */
MEGABIT_API int megabit_pack_panels(const struct isa *isa, const int8_t *codes, uint8_t *panels,
                                    int64_t n, int64_t k, int threads);
MEGABIT_API int megabit_pack_int8(const struct isa *isa, const int8_t *weight, uint8_t *panels,
                                  int64_t n, int64_t k, int threads);

/* Ternary panels to [N, K] of int8, bfloat16 or float32, without any scale. */
MEGABIT_API int megabit_unpack_panels(const struct isa *isa, const uint8_t *panels, void *out,
                                      int out_type, int64_t n, int64_t k, int threads);

/* k, v [tokens, kv_heads, head_dim] in a type of floats to slots block * block_size + offset;
 * MEGABIT_BAD_VALUE, and nothing written, if there is no such slot. */
MEGABIT_API int megabit_write_pages(const struct isa *isa, const struct megabit_pages *pages,
                                    const void *k, const void *v, int type, const int64_t *slots,
                                    int64_t tokens, int threads);

/* Causal attention of q [tokens, heads, head_dim], scores times `scale`: rows query_starts[i] to
 * query_starts[i + 1] are the last tokens of sequence i, which has context_lengths[i] of them in
 * the pages block_tables[i] [most_blocks]. statistics [tokens, heads, 2], which may be NULL, gets
 * the largest score of each row and the sum of e^(score - largest). MEGABIT_BAD_VALUE, and nothing
 * read, if there is no such page, head or row. */
MEGABIT_API int megabit_paged_attention(const struct isa *isa, const void *q, int type,
                                        const struct megabit_pages *pages,
                                        const int32_t *kv_of_query, int64_t tokens, int64_t heads,
                                        const int32_t *block_tables, int64_t most_blocks,
                                        const int32_t *query_starts, const int32_t *context_lengths,
                                        int64_t sequences, float scale, void *out,
                                        float *statistics, int threads);

/* x [m, k] times W [n, k], both in one type of floats: out [m, n] in that type, each element summed
 * in one order. Instruction sets with fused multiply-add agree, except on bfloat16, for which
 * avx512bf16 has an order of its own. */
MEGABIT_API int megabit_dense_product(const struct isa *isa, const void *x, const void *weight,
                                      void *out, int type, int64_t m, int64_t n, int64_t k,
                                      int threads);

/* 1e9 multiplications and additions per second of dot products between registers. */
MEGABIT_API int megabit_measure_dot_peak(const struct isa *isa, double *gops, double seconds,
                                         int threads);

/* 1e9 bytes per second at which the buffer is read: the best of its portions of 64 MiB and of some
 * repetitions. It should be several times as large as the caches. */
MEGABIT_API int megabit_measure_read_bandwidth(const struct isa *isa, double *gigabytes_per_second,
                                               const void *buffer, int64_t bytes, int repetitions,
                                               int threads);

#endif
