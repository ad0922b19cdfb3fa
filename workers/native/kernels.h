// What a level of instructions offers to the rest: one table of functions, each working on a range of rows, column
// blocks or one attention unit, on one thread. Every result row depends on its own inputs alone, in a fixed order of
// sums: neither threads nor batch nor chunking change a bit of it.
#pragma once
#include <math.h>

#include <algorithm>

#include "abi.h"

namespace baton {

constexpr int LANES = 16;   // columns of a block of outputs; floats of a vector
constexpr int GROUP = 32;   // inputs that share a scale
constexpr int MAX_ATTENTION_ROWS = 12;

// A packed weight: blocks of 16 outputs one after the other, `block_bytes` each, zero columns at the end of the last.
//   FP32, BF16   [K][16]
//   INT8         [K/32][512 bytes]; scale float [N]
//   Q8           pairs of groups: float16 scales [2][16], then twice 512 bytes; one stream, or reading halves in speed
//   Q4           [K/32][256 bytes, float16 scale [16], float16 min [16]]
// The order of the 512 bytes of a group is the level's own; Q4 byte i holds its bytes i (low half) and i + 256.
struct Matrix {
    int64_t kind, n, k, num_blocks;
    int64_t block_bytes;
    uint8_t *data;
    float *scale;

    bool is_grouped() const { return kind >= BATON_INT8; }
};

// Rows times a matrix. Dense kinds read x; grouped ones the rounded form.
struct Activations {
    int64_t k;
    const float *x;         // [rows][k]
    int8_t *q;              // [rows][k]
    float *scale;           // [rows][k/32]
    float *scaled_sum;      // [rows][k/32]: scale times the sum of q, for weights with a minimum
    int32_t *offset;        // [rows][k/32]: -128 times the sum of q, for weights stored as unsigned bytes
};

// How the 32 x 16 weights of a group lie: bytes 0 to 255, bytes of -128 to 127, or two of 0 to 15 a byte.
enum class Storage { UNSIGNED, SIGNED, HALVES };

struct Range {
    int64_t low, high;
};

struct LinearJob {
    const Matrix *weight;
    Activations in;
    const float *bias;
    float *out;             // [rows][n]
};

struct AttentionJob {
    const BatonAttention *attention;
    const BatonTables *tables;
    BatonCache cache;       // of one layer
    const float *q;
    int64_t q_stride;       // floats between the q of two tokens
    float *out;             // [rows][H * D]
};

// The queries of `num_tokens` consecutive tokens that share one KV head, and the row of the first one's output.
struct AttentionUnit {
    int64_t span, first_token, num_tokens, kv_head, first_out;
};

struct Kernels {
    int (*group_index)(int k, int n);   // where input k of output n lies in the 512 bytes of a group
    int q8_bias;                        // added to signed weights when packed

    void (*unpack_row)(const Matrix &, int64_t row, float *out);
    void (*round_row)(const Activations &, int64_t row, Range groups, const float *x);
    void (*linear)(const LinearJob &, Range rows, Range blocks, uint8_t *scratch);
    void (*norm_row)(const float *x, const float *weight, float eps, int64_t width, float *out);
    void (*add_row)(float *x, const float *delta, int64_t width);
    void (*scale_row)(float *x, float factor, int64_t width);
    void (*softcap_row)(float *x, float cap, int64_t width);
    void (*activate_row)(int64_t activation, const float *gate, const float *up, int64_t width, float *out);
    void (*rotate_row)(const float *cos, const float *sin, int64_t pairs, float *head);
    void (*store_row)(const float *head, int64_t width, bool is_bf16, void *out);
    void (*store_column)(const float *head, int64_t width, bool is_bf16, void *out, int64_t stride);
    void (*attend)(const AttentionJob &, const AttentionUnit &, float *scratch);
    int64_t (*find_largest)(const float *x, int64_t width, float *largest);
    int64_t (*draw_row)(const float *logits, int64_t width, const BatonDraw &, float *scratch);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

// Bytes of scratch that `linear`, `attend` and `draw_row` may use on each thread.
int64_t linear_scratch_bytes(int64_t k);
int64_t attention_scratch_bytes(int64_t context, int64_t head_dim);
int64_t draw_scratch_bytes(int64_t width);

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
inline int64_t num_groups(int64_t k) { return k / GROUP; }

constexpr int64_t Q8_PAIR_BYTES = 64 + 2 * 512;
inline int64_t q8_scale_offset(int64_t g) { return g / 2 * Q8_PAIR_BYTES + g % 2 * 32; }
inline int64_t q8_group_offset(int64_t g) { return g / 2 * Q8_PAIR_BYTES + 64 + g % 2 * 512; }

}  // namespace baton
