/* out = gate / (1 + e^-gate) * up. gate_up: [rows, 2 * size], gate first. out: [rows, size]. */
#include "vectors.h"

void silu_and_mul(const float *gate_up, float *out, long rows, int size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > WORTH_A_THREAD)
    for (long row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * size, *up = gate + size;
        for (int i = 0; i < size; i += LANES) {
            Vec x = AT(gate + i), one = (Vec){0} + 1;
            Vec small = exp_of(choose(x > 0, -x, x)); /* e^-|x|, which cannot overflow */
            AT(out + row * size + i) = x * choose(x > 0, one, small) / (one + small) * AT(up + i);
        }
    }
}
