/* What the files about pages of a KV cache share. */
#ifndef MEGABIT_PAGES_H
#define MEGABIT_PAGES_H

#include "isa.h"

INLINE int64_t type_bytes(int type)
{
    return type == MEGABIT_FLOAT32 ? 4 : type == MEGABIT_INT8 ? 1 : 2;
}

#endif
