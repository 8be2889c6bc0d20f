#include "avx512vnni.h"
#include "elementwise.h"
#include "float_tiles.h"

const struct isa isa_avx512vnni = {
    .name = "avx512vnni",
    .micro = AVX512VNNI,
    .elementwise = ELEMENTWISE,
    .floats = FLOAT_KERNELS,
};
