/* Paged attention of sequences that decode, on a CPU: K and V are read where they lie, once, and never gathered.

   The same online softmax as in paged_decode.py (Milakov and Gimelshein, arXiv 1805.02867): a chunk of the context at
   a time; when a larger score turns up, what was summed before is shrunk. */
#include "vectors.h"
#include <math.h>

enum { CHUNK = 64 };
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

INLINE float dot(const float *a, const float *b, int dim) {
    Vec even = {0}, odd = {0}; /* two sums, so that one need not wait for the other */
    int d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        even += AT(a + d) * AT(b + d);
        odd += AT(a + d + LANES) * AT(b + d + LANES);
    }
    if (d < dim) even += AT(a + d) * AT(b + d);
    return sum_of(even + odd);
}

/* out = shrink * out + the sum of weights[i] * rows[i] */
INLINE void add_weighted(float *out, float shrink, const float *weights, const float *const *rows, int count, int dim) {
    int d = 0;
    for (; d + 8 * LANES <= dim; d += 8 * LANES) { /* so many sums stay in registers */
#define LOAD(j) Vec sum##j = shrink * AT(out + d + j * LANES);
#define ADD(j) sum##j += weights[i] * AT(rows[i] + d + j * LANES);
#define STORE(j) AT(out + d + j * LANES) = sum##j;
        EACH(LOAD)
        for (int i = 0; i < count; i++) { EACH(ADD) }
        EACH(STORE)
    }
    for (; d < dim; d += LANES) {
        Vec sum = shrink * AT(out + d);
        for (int i = 0; i < count; i++) sum += weights[i] * AT(rows[i] + d);
        AT(out + d) = sum;
    }
}

/* One sequence: `kv_heads` neighbouring KV heads, each read by `group` query heads. A token's K of all heads of the
   cache is `token` floats. `dim` is a constant where this is inlined. */
INLINE void attend(const float *q, float *out, const float *k_cache, const float *v_cache, const int32_t *table,
                   int context, int block_size, long token, int kv_heads, int group, int dim, float scale) {
    float most[kv_heads * group], total[kv_heads * group], weights[CHUNK];
    const float *k[CHUNK], *v[CHUNK];
    for (int h = 0; h < kv_heads * group; h++) most[h] = -FLT_MAX, total[h] = 0;
    for (int i = 0; i < kv_heads * group * dim; i++) out[i] = 0;
    for (int begin = 0; begin < context; begin += CHUNK) {
        int count = context - begin < CHUNK ? context - begin : CHUNK;
        for (int i = 0; i < count; i++) {
            long at = ((long)table[(begin + i) / block_size] * block_size + (begin + i) % block_size) * token;
            k[i] = k_cache + at, v[i] = v_cache + at;
        }
        for (int h = 0; h < kv_heads * group; h++) {
            float top = most[h];
            for (int i = 0; i < count; i++) {
                weights[i] = scale * dot(q + h * dim, k[i], dim);
                top = weights[i] > top ? weights[i] : top;
            }
            for (int i = count; i % LANES; i++) weights[i] = -INFINITY;
            Vec sums = {0};
            for (int i = 0; i < count; i += LANES) sums += AT(weights + i) = exp_of(AT(weights + i) - top);
            float shrink = exp_of((Vec){0} + (most[h] - top))[0];
            total[h] = total[h] * shrink + sum_of(sums);
            most[h] = top;
            add_weighted(out + h * dim, shrink, weights, v, count, dim);
            if ((h + 1) % group == 0)
                for (int i = 0; i < count; i++) k[i] += dim, v[i] += dim; /* on to the next KV head */
        }
    }
    for (int h = 0; h < kv_heads * group; h++) {
        float sum = total[h] == 0 ? 1 : total[h]; /* 0: all scores are -infinity, and out is 0 as in torch */
        for (int d = 0; d < dim; d += LANES) AT(out + h * dim + d) /= sum;
    }
}

/* q: [num_seqs, heads, dim], a sequence's q_stride floats after the one before. out: [num_seqs, heads, dim]. k_cache,
   v_cache: [num_blocks, block_size, kv_heads, dim]. tables: block tables one after the other, that of sequence s from
   table_start[s] on. contexts: [num_seqs], at least 1 each. dim: a multiple of LANES. */
void paged_decode(const float *q, long q_stride, float *out, const float *k_cache, const float *v_cache,
                  const int32_t *tables, const int32_t *table_start, const int32_t *contexts, int num_seqs, int heads,
                  int kv_heads, int dim, int block_size, float scale, int num_threads) {
    /* All heads of a token lie side by side, so a sequence goes to one thread, unless there are too few. */
    int parts = num_seqs < num_threads ? kv_heads : 1, group = heads / kv_heads, part_heads = kv_heads / parts;
    long token = (long)kv_heads * dim;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int item = 0; item < num_seqs * parts; item++) {
        int s = item / parts, head = item % parts * part_heads;
        const float *queries = q + s * q_stride + head * group * dim;
        float *sums = out + ((long)s * heads + head * group) * dim;
        const float *k = k_cache + head * dim, *v = v_cache + head * dim;
        const int32_t *table = tables + table_start[s];
#define ATTEND(DIM) \
    attend(queries, sums, k, v, table, contexts[s], block_size, token, part_heads, group, DIM, scale)
        if (dim == 64) ATTEND(64);
        else if (dim == 128) ATTEND(128);
        else ATTEND(dim);
    }
}
