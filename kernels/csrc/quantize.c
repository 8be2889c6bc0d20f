/* Activations to int8, one row (token) after the other: a row is read for its largest magnitude and
 * again, from cache, for its codes. */

#include <stddef.h>

#include "isa.h"
#include "threads.h"

static const float MIN_SCALE = 1e-5f;

struct quantization {
    const struct isa *isa;
    const void *x;
    int x_type;
    const float *absmax;
    int8_t *x_q;
    float *scale;
    int64_t k;
};

/* numerics.activation_scale; a NaN passes through. */
static float scale_of(float absmax)
{
    return (absmax < MIN_SCALE ? MIN_SCALE : absmax) / 127.0f;
}

static void quantize_rows(void *context, int64_t begin, int64_t end)
{
    const struct quantization *q = context;
    const struct elementwise *elementwise = &q->isa->elementwise;
    for (int64_t row = begin; row < end; row++) {
        int8_t *out = q->x_q + row * q->k;
        if (q->x_type == MEGABIT_FLOAT32) {
            const float *x = (const float *)q->x + row * q->k;
            q->scale[row] =
                scale_of(q->absmax ? q->absmax[row] : elementwise->absmax_float32(x, q->k));
            elementwise->quantize_float32(x, q->scale[row], q->k, out);
        } else {
            const uint16_t *x = (const uint16_t *)q->x + row * q->k;
            q->scale[row] =
                scale_of(q->absmax ? q->absmax[row] : elementwise->absmax_bfloat16(x, q->k));
            elementwise->quantize_bfloat16(x, q->scale[row], q->k, out);
        }
    }
}

int megabit_quantize_activation(const struct isa *isa, const void *x, int x_type,
                                const float *absmax, int8_t *x_q, float *scale, int64_t m,
                                int64_t k, int threads)
{
    struct quantization q = {isa, x, x_type, absmax, x_q, scale, k};
    parallel_for(m, threads_for((double)m * (double)k, threads), quantize_rows, &q);
    return MEGABIT_OK;
}
