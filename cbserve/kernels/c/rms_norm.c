/* total = x + residual; out = total * weight / sqrt(mean(total^2) + eps), row by row. All are [rows, size]. */
#include "vectors.h"
#include <math.h>

void add_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *total, long rows,
                  int size, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && rows * size > WORTH_A_THREAD)
    for (long row = 0; row < rows; row++) {
        long at = row * size;
        Vec squares = {0};
        for (int i = 0; i < size; i += LANES) {
            Vec sum = AT(x + at + i) + AT(residual + at + i);
            AT(total + at + i) = sum;
            squares += sum * sum;
        }
        float scale = 1 / sqrtf(sum_of(squares) / size + eps);
        for (int i = 0; i < size; i += LANES) AT(out + at + i) = AT(total + at + i) * scale * AT(weight + i);
    }
}
