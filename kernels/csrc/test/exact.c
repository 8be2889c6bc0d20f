/* Every instruction set of this machine against the definition of the products, without Python: for
 * machines that are only emulated. The tests in tests/kernels say more. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../megabit_kernels.h"

static uint32_t state = 1;

static int random_below(int limit)
{
    state = state * 1664525 + 1013904223;
    return (int)((state >> 8) % (uint32_t)limit);
}

static void *allocate(int64_t bytes)
{
    void *data = calloc((size_t)(bytes > 0 ? bytes : 1), 1);
    if (data == NULL)
        exit(2);
    return data;
}

/* extreme: x is -128 or 127 and w the largest of its type, so that sums are the largest, too. */
static int wrong_products(const struct isa *isa, int64_t m, int64_t n, int64_t k, int extreme)
{
    int8_t *x = allocate(m * k), *codes = allocate(n * k), *bytes = allocate(n * k);
    int8_t *codes_back = allocate(n * k);
    uint8_t *ternary = allocate((n + 63) / 64 * 64 * ((k + 15) / 16 * 16) / 4);
    uint8_t *int8 = allocate((n + 63) / 64 * 64 * ((k + 15) / 16 * 16));
    int32_t *got_ternary = allocate(4 * m * n), *got_int8 = allocate(4 * m * n);
    for (int64_t i = 0; i < m * k; i++)
        x[i] = (int8_t)(extreme ? (i / k % 2 ? 127 : -128) : random_below(256) - 128);
    for (int64_t i = 0; i < n * k; i++) {
        codes[i] = (int8_t)(extreme ? (i / k % 2 ? 1 : -1) : random_below(3) - 1);
        bytes[i] = (int8_t)(extreme ? codes[i] * 127 : random_below(255) - 127);
    }
    int wrong = 0;
    wrong += megabit_pack_panels(isa, codes, ternary, n, k, 1) != MEGABIT_OK;
    wrong += megabit_pack_int8(isa, bytes, int8, n, k, 1) != MEGABIT_OK;
    megabit_unpack_panels(isa, ternary, codes_back, MEGABIT_INT8, n, k, 1);
    wrong += memcmp(codes, codes_back, (size_t)(n * k)) != 0;
    megabit_ternary_product(isa, x, ternary, got_ternary, MEGABIT_INT32, m, n, k, NULL, 0, 1);
    megabit_int8_product(isa, x, int8, got_int8, MEGABIT_INT32, m, n, k, NULL, NULL, 1);
    for (int64_t row = 0; row < m; row++)
        for (int64_t column = 0; column < n; column++) {
            int64_t with_codes = 0, with_bytes = 0;
            for (int64_t i = 0; i < k; i++) {
                with_codes += x[row * k + i] * codes[column * k + i];
                with_bytes += x[row * k + i] * bytes[column * k + i];
            }
            wrong += got_ternary[row * n + column] != with_codes;
            wrong += got_int8[row * n + column] != with_bytes;
        }
    free(x), free(codes), free(bytes), free(codes_back);
    free(ternary), free(int8), free(got_ternary), free(got_int8);
    return wrong;
}

int main(void)
{
    static const int64_t SIZES[][3] = {{1, 1, 1},    {1, 65, 63},  {2, 64, 64},    {3, 130, 257},
                                       {4, 7, 1000}, {5, 64, 16},  {6, 100, 1030}, {17, 129, 515},
                                       {65, 70, 70}, {200, 65, 40}};
    int failures = 0;
    for (int i = 0; megabit_isa(i) != NULL; i++) {
        const struct isa *isa = megabit_isa(i);
        int wrong = 0;
        for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++)
            wrong += wrong_products(isa, SIZES[s][0], SIZES[s][1], SIZES[s][2], 0);
        for (int64_t m = 1; m < 8; m += 3)
            wrong += wrong_products(isa, m, 3, 131072, 1);
        printf("%s: %s\n", megabit_isa_name(isa), wrong ? "WRONG" : "exact");
        failures += wrong;
    }
    return failures != 0;
}
