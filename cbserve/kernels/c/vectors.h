/* Vectors of eight floats, as GCC and clang have them: they become what the processor has. */
#pragma once
#include <float.h>
#include <stdint.h>

enum { LANES = 8 };
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define AT(p) (*(Vec *)(p))

/* Below so many floats a second thread costs more than it brings. */
enum { WORTH_A_THREAD = 1 << 15 };

INLINE float sum_of(Vec x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

INLINE Vec choose(IntVec mask, Vec where_set, Vec elsewhere) {
    return (Vec)(((IntVec)where_set & mask) | ((IntVec)elsewhere & ~mask));
}

/* e^x for x <= 0, within 2e-7 of it, and 0 below 2^-126: 2^n times a Taylor series of 2^r, where n + r = x log2(e) and
   |r| <= 1/2. NaN gives NaN. */
INLINE Vec exp_of(Vec x) {
    Vec y = x * 1.44269504f, least = (Vec){0} - 126, zero = {0};
    IntVec gone = y < least;
    y = choose(gone, least, y);
    IntVec n = __builtin_convertvector(y - 0.5f, IntVec);
    Vec r = (y - __builtin_convertvector(n, Vec)) * 0.69314718f;
    Vec series = 1 + r * (1 + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
    return choose(gone, zero, series * (Vec)((n + 127) << 23));
}
