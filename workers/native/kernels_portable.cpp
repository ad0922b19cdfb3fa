// Any processor: vectors of the compiler, which it cuts to what the machine has. Correct first.
#include <string.h>

#include "kernels.h"

namespace baton {
namespace {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_METHOD inline __attribute__((always_inline))

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int16_t S16 __attribute__((vector_size(32)));
typedef uint16_t U16 __attribute__((vector_size(32)));
typedef int8_t S8 __attribute__((vector_size(16)));
typedef uint8_t U8 __attribute__((vector_size(16)));

constexpr int DENSE_ROWS = 2, DENSE_BLOCKS = 1;
constexpr int TILE_ROWS = 2, PAIR_ROWS = 0;
constexpr int KEY_VECTORS = 1, KEY_ROWS = 2;
constexpr int VALUE_VECTORS = 1, VALUE_ROWS = 2;

template <class V>
INLINE V load_as(const void *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE F load(const float *p) { return load_as<F>(p); }
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
INLINE F load_part(const float *p, int n) {
    F v = {0};
    memcpy(&v, p, 4 * (size_t)n);
    return v;
}
INLINE void store_part(float *p, F v, int n) { memcpy(p, &v, 4 * (size_t)n); }
INLINE F splat(float x) { return F{0} + x; }
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F div(F a, F b) { return a / b; }
INLINE F fma(F a, F b, F c) { return a * b + c; }  // two roundings: -ffp-contract=off
INLINE F max_of(F a, F b) { return a > b ? a : b; }
INLINE F min_of(F a, F b) { return a < b ? a : b; }
INLINE F select_less(F x, F bound, F less, F otherwise) { return x < bound ? less : otherwise; }

INLINE F load(const uint16_t *p) { return (F)(__builtin_convertvector(load_as<U16>(p), U) << 16); }  // bfloat16
INLINE void store(uint16_t *p, F v) {  // bfloat16, to nearest even, NaN stays NaN
    const U bits = (U)v;
    U rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    rounded = v == v ? rounded : U{0} + 0x7fc0;
    const U16 halves = __builtin_convertvector(rounded, U16);
    memcpy(p, &halves, sizeof halves);
}
// The exponent is moved by multiplication, which also makes subnormal halves right; infinity and NaN by hand.
INLINE F load_f16(const void *p) {
    const U half = __builtin_convertvector(load_as<U16>(p), U);
    const F finite = (F)((half & 0x7fff) << 13) * 0x1p112f;
    const F special = (F)(((half & 0x7fff) << 13) | 0x7f800000u);
    const F magnitude = (half & 0x7c00) == 0x7c00 ? special : finite;
    return (F)((U)magnitude | ((half & 0x8000) << 16));
}

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even below 2^22
INLINE I to_int(F v) { return __builtin_convertvector((v + ROUNDING) - ROUNDING, I); }
INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
INLINE void store_int8(int8_t *p, I v) {
    v = v > 127 ? I{0} + 127 : v;
    v = v < -128 ? I{0} - 128 : v;
    const S8 bytes = __builtin_convertvector(v, S8);
    memcpy(p, &bytes, sizeof bytes);
}
INLINE I add_int(I a, I b) { return a + b; }
INLINE I max_int(I a, I b) { return a > b ? a : b; }
INLINE I magnitude_bits(F v) { return (I)v & 0x7fffffff; }
INLINE F power_of_two(I n) { return (F)((n + 127) << 23); }
INLINE int32_t sum_int(I v) {
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
INLINE int32_t largest_int(I v) {
    int32_t best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}
INLINE float sum(F v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
INLINE float largest(F v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// --- 32 inputs of 16 outputs as integers: input by input, 16 bytes each -----------------------------------------------

constexpr int Q8_BIAS = 0;
constexpr int64_t PAIRS_FROM = 0, DIRECT_ROWS = 0;
int group_index(int k, int n) { return k * LANES + n; }

INLINE void unpack_halves(const uint8_t *halves, uint8_t *out) {
    for (int i = 0; i < 256; i++) {
        out[i] = halves[i] & 15;
        out[i + 256] = halves[i] >> 4;
    }
}
// A product of a byte pair is at most 2 * 128 * 127 = 32,512: two fit a 16-bit sum.
INLINE I dot_signed(const uint8_t *w, const int8_t *a) {
    I total = {0};
    for (int k = 0; k < GROUP; k += 2) {
        const S16 first = __builtin_convertvector(load_as<S8>(w + k * LANES), S16) * (int16_t)a[k];
        const S16 second = __builtin_convertvector(load_as<S8>(w + (k + 1) * LANES), S16) * (int16_t)a[k + 1];
        total += __builtin_convertvector(first + second, I);
    }
    return total;
}
INLINE I dot_unsigned(const uint8_t *w, const int8_t *a) { return dot_signed(w, a); }  // 0 to 15 is both
INLINE I dot_halves(const uint8_t *w, const int8_t *a) {
    uint8_t bytes[512];
    unpack_halves(w, bytes);
    return dot_signed(bytes, a);
}

template <Storage S>
INLINE I dot(const uint8_t *weights, const int8_t *a) {
    if constexpr (S == Storage::UNSIGNED) return dot_unsigned(weights, a);
    else if constexpr (S == Storage::SIGNED) return dot_signed(weights, a);
    else return dot_halves(weights, a);
}

// product[r][0] = a group's weights times row r of q, rows `stride` apart.
template <Storage S, int R, int C>
INLINE void multiply_group(const uint8_t *const *weights, const int8_t *q, int64_t stride, const int32_t *, int64_t,
                           I (&product)[R][C]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) product[r][0] = dot<S>(weights[0], q + r * stride);
}

#include "kernels_rows.inl"
#include "kernels_linear.inl"
#include "kernels_attention.inl"
#include "kernels_sample.inl"

}  // namespace

#define KERNELS kernels_portable
#include "kernels_table.inl"

}  // namespace baton
