/* Paged attention of sequences that decode, on a CPU: K and V are read in their blocks, once, and never gathered.

   The same online softmax as in paged_decode.py (Milakov and Gimelshein, arXiv 1805.02867): a chunk of the context at
   a time, what was summed before is shrunk when a larger score turns up. Vectors are GCC's and clang's own. */
#include <float.h>
#include <stdint.h>

enum { LANES = 8, CHUNK = 128, MOST_HEADS = 64 };
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define AT(p) (*(Vec *)(p))

INLINE float sum_of(Vec x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

/* e^x for x <= 0, within 2e-7 of it: 2^n times a Taylor series of 2^r, where n + r = x log2(e) and |r| <= 1/2. */
INLINE Vec exp_of(Vec x) {
    Vec y = x * 1.44269504f, least = (Vec){0} - 126;
    IntVec fits = y > least;
    y = (Vec)(((IntVec)y & fits) | ((IntVec)least & ~fits)); /* the larger of the two; 2^-126 is next to nothing */
    IntVec n = __builtin_convertvector(y - 0.5f, IntVec);
    Vec r = (y - __builtin_convertvector(n, Vec)) * 0.69314718f;
    Vec series = 1 + r * (1 + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
    return series * (Vec)((n + 127) << 23);
}

/* One KV head of one sequence and the `group` query heads that read it. `dim` is a constant where this is inlined. */
INLINE void attend(const float *q, float *out, const float *k_cache, const float *v_cache, const int32_t *table,
                   int context, int block_size, long slot, int group, int dim, float scale) {
    float most[MOST_HEADS], total[MOST_HEADS], weights[CHUNK + LANES];
    long at[CHUNK];
    for (int g = 0; g < group; g++) most[g] = -FLT_MAX, total[g] = 0;
    for (int i = 0; i < group * dim; i++) out[i] = 0;
    for (int begin = 0; begin < context; begin += CHUNK) {
        int count = context - begin < CHUNK ? context - begin : CHUNK;
        for (int i = 0; i < count; i++)
            at[i] = ((long)table[(begin + i) / block_size] * block_size + (begin + i) % block_size) * slot;
        for (int g = 0; g < group; g++, q += dim, out += dim) {
            float top = most[g];
            for (int i = 0; i < count; i++) {
                Vec products = {0};
                for (int d = 0; d < dim; d += LANES) products += AT(q + d) * AT(k_cache + at[i] + d);
                weights[i] = scale * sum_of(products);
                top = weights[i] > top ? weights[i] : top;
            }
            for (int i = count; i % LANES; i++) weights[i] = -FLT_MAX;
            Vec sums = {0};
            for (int i = 0; i < count; i += LANES) sums += AT(weights + i) = exp_of(AT(weights + i) - top);
            Vec shrink = exp_of((Vec){0} + (most[g] - top));
            total[g] = total[g] * shrink[0] + sum_of(sums);
            most[g] = top;
            for (int d = 0; d < dim; d += 8 * LANES) { /* so many sums stay in registers */
                Vec values[8];
                int width = dim - d < 8 * LANES ? (dim - d) / LANES : 8;
                for (int j = 0; j < width; j++) values[j] = AT(out + d + j * LANES) * shrink[0];
                for (int i = 0; i < count; i++)
                    for (int j = 0; j < width; j++) values[j] += weights[i] * AT(v_cache + at[i] + d + j * LANES);
                for (int j = 0; j < width; j++) AT(out + d + j * LANES) = values[j];
            }
        }
        q -= group * dim, out -= group * dim;
    }
    for (int g = 0; g < group; g++)
        for (int d = 0; d < dim; d += LANES) AT(out + g * dim + d) /= total[g];
}

/* q: [num_seqs, heads, dim], rows q_stride floats apart. out: [num_seqs, heads, dim]. k_cache, v_cache:
   [num_blocks, block_size, kv_heads, dim]. tables: the block tables one after the other; that of sequence s begins at
   table_start[s]. contexts: [num_seqs], at least 1. dim: a multiple of LANES; at most MOST_HEADS heads a KV head. */
void paged_decode(const float *q, long q_stride, float *out, const float *k_cache, const float *v_cache,
                  const int32_t *tables, const int32_t *table_start, const int32_t *contexts, int num_seqs, int heads,
                  int kv_heads, int dim, int block_size, float scale, int num_threads) {
    int group = heads / kv_heads;
    long slot = (long)kv_heads * dim;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int item = 0; item < num_seqs * kv_heads; item++) {
        int s = item / kv_heads, head = item % kv_heads;
        const float *queries = q + s * q_stride + head * group * dim;
        float *sums = out + ((long)s * heads + head * group) * dim;
        const float *k = k_cache + head * dim, *v = v_cache + head * dim;
        const int32_t *table = tables + table_start[s];
#define ATTEND(DIM) attend(queries, sums, k, v, table, contexts[s], block_size, slot, group, DIM, scale)
        if (dim == 64) ATTEND(64);
        else if (dim == 128) ATTEND(128);
        else ATTEND(dim);
    }
}
