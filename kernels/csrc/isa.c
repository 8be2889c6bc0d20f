/* The instruction sets of this machine. native_build.py says by WITH_... which ones the compiler
 * could build; what the processor and the system support is asked when the program runs. */

#include "isa.h"

#include <stddef.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

struct candidate {
    const struct isa *isa;
    bool (*is_usable)(void);
};

#if defined(WITH_AVX512VNNI) || defined(WITH_AVX512BF16)
static bool has_avx512vnni(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

/* By CPUID: older releases of Clang cannot ask for these by name. */
#if defined(WITH_AVX512BF16)
static bool has_avx512bf16(void)
{
    unsigned eax, ebx, ecx, edx;
    return has_avx512vnni() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) &&
           (eax >> 5 & 1) != 0;
}
#endif

#if defined(WITH_AVXVNNI)
static bool has_avxvnni(void)
{
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1) != 0;
}
#endif

#if defined(WITH_AVX2)
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#if defined(WITH_NEONDOT)
static bool has_neondot(void)
{
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true; /* every 64-bit Apple processor has it */
#endif
}
#endif

static bool always(void)
{
    return true;
}

static const struct candidate CANDIDATES[] = {
#if defined(WITH_AVX512BF16)
    {&isa_avx512bf16, has_avx512bf16},
#endif
#if defined(WITH_AVX512VNNI)
    {&isa_avx512vnni, has_avx512vnni},
#endif
#if defined(WITH_AVXVNNI)
    {&isa_avxvnni, has_avxvnni},
#endif
#if defined(WITH_AVX2)
    {&isa_avx2, has_avx2},
#endif
#if defined(WITH_NEONDOT)
    {&isa_neondot, has_neondot},
#endif
    {&isa_portable, always},
};

int megabit_abi(void)
{
    return MEGABIT_ABI;
}

const struct isa *megabit_isa(int number)
{
    for (size_t i = 0; i < sizeof CANDIDATES / sizeof *CANDIDATES; i++)
        if (CANDIDATES[i].is_usable() && number-- == 0)
            return CANDIDATES[i].isa;
    return NULL;
}

const char *megabit_isa_name(const struct isa *isa)
{
    return isa->name;
}
