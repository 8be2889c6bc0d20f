/* Keys and values into the pages of a cache, rounded to its type. */

#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "pages.h"
#include "scratch.h"

/* One head of one token: D numbers, `stride` elements apart, and the scale of int8. */
static void write_head(const struct isa *isa, const float *x, int64_t d, int type, char *out,
                       int64_t stride, float *scale)
{
    enum { SOME = 64 };
    if (type == MEGABIT_INT8)
        *scale = isa->elementwise.absmax_float32(x, d) / 127.0f;
    for (int64_t first = 0; first < d; first += SOME) {
        int64_t count = smaller(SOME, d - first);
        char some[4 * SOME];
        if (type == MEGABIT_INT8)
            isa->elementwise.quantize_float32(x + first, *scale, count, (int8_t *)some);
        else
            isa->floats.narrow_row(x + first, 1.0f, count, type, some);
        if (type == MEGABIT_FLOAT32)
            for (int64_t i = 0; i < count; i++)
                memcpy(out + 4 * stride * (first + i), some + 4 * i, 4);
        else if (type == MEGABIT_INT8)
            for (int64_t i = 0; i < count; i++)
                out[stride * (first + i)] = some[i];
        else
            for (int64_t i = 0; i < count; i++)
                memcpy(out + 2 * stride * (first + i), some + 2 * i, 2);
    }
}

int megabit_write_pages(const struct isa *isa, const struct megabit_pages *pages, const void *k,
                        const void *v, int type, const int64_t *slots, int64_t tokens, int threads)
{
    (void)threads; /* it is a copy */
    const int64_t d = pages->head_dim, block = pages->block_size, kv_heads = pages->kv_heads;
    const int64_t bytes = type_bytes(pages->type);
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] < 0 || slots[token] >= pages->blocks * block)
            return MEGABIT_BAD_VALUE;
    float *wide = scratch(SCRATCH_SUMS, sizeof(float) * 2 * (size_t)d);
    if (wide == NULL)
        return MEGABIT_NO_MEMORY;
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t from = type_bytes(type) * (token * kv_heads + head) * d;
            int64_t page = slots[token] / block * kv_heads + head, offset = slots[token] % block;
            isa->floats.widen_rows((const char *)k + from, type, 0, 1, d, wide, 0);
            isa->floats.widen_rows((const char *)v + from, type, 0, 1, d, wide + d, 0);
            write_head(isa, wide, d, pages->type,
                       (char *)pages->keys + bytes * (page * block * d + offset), block,
                       pages->key_scale == NULL ? NULL : pages->key_scale + page * block + offset);
            write_head(isa, wide + d, d, pages->type,
                       (char *)pages->values + bytes * (page * block + offset) * d, 1,
                       pages->value_scale == NULL ? NULL
                                                  : pages->value_scale + page * block + offset);
        }
    return MEGABIT_OK;
}
