/* K and V of new tokens into the cache: token t goes to slots[t], unless that is negative. k, v: [tokens, size], a
   token's `stride` floats after the one before. k_cache, v_cache: [num_slots, size]. Returns the first slot that does
   not exist, before anything was written, or -1. */
#include <stdint.h>
#include <string.h>

int64_t store_kv(const float *k, long k_stride, const float *v, long v_stride, float *k_cache, float *v_cache,
                 const int64_t *slots, long tokens, int64_t num_slots, long size) {
    for (long t = 0; t < tokens; t++)
        if (slots[t] >= num_slots) return slots[t];
    for (long t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        memcpy(k_cache + slots[t] * size, k + t * k_stride, size * sizeof(float));
        memcpy(v_cache + slots[t] * size, v + t * v_stride, size * sizeof(float));
    }
    return -1;
}
