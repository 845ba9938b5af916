/* Turn every head of every token: neighbours are the real and the imaginary part of a complex number.
   x: [tokens, heads, dim], a token's `stride` floats after the one before. rotation: [tokens, dim / 2] complex.
   out: [tokens, heads, dim]. */
#include "vectors.h"

void rotary(const float *x, long stride, const float *rotation, float *out, long tokens, int heads, int dim,
            int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && tokens * heads * dim > WORTH_A_THREAD)
    for (long token = 0; token < tokens; token++) {
        const float *turn = rotation + token * dim;
        for (int head = 0; head < heads; head++) {
            const float *from = x + token * stride + head * dim;
            float *to = out + (token * heads + head) * dim;
            for (int i = 0; i < dim; i += 2) {
                to[i] = from[i] * turn[i] - from[i + 1] * turn[i + 1];
                to[i + 1] = from[i] * turn[i + 1] + from[i + 1] * turn[i];
            }
        }
    }
}
