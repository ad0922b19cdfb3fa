// The C ABI of Baton's CPU kernels: what workers/ops/native.py sees. No C++ and no torch types cross it.
//
// Shapes: T tokens of the step, R asked rows, M width of the model, N outputs, K inputs, H query heads, J KV heads,
// D head_dim, S block_tokens. Tensors are contiguous; activations are float32, indices int64. A function returns 0, or
// a negative BATON_* code. One engine is used by one thread at a time; it brings its own helper threads.
#ifndef BATON_ABI_H
#define BATON_ABI_H
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BATON_EXPORT __attribute__((visibility("default")))
#else
#define BATON_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { BATON_OK = 0, BATON_NO_MEMORY = -1, BATON_STOPPED = -2, BATON_BAD_ARGUMENT = -3 };
enum { BATON_PORTABLE = 0, BATON_AVX2 = 1, BATON_AVX512 = 2 };
enum { BATON_FP32 = 0, BATON_BF16 = 1, BATON_INT8 = 2, BATON_Q8 = 3, BATON_Q4 = 4 };
enum { BATON_SILU = 0, BATON_GELU_TANH = 1, BATON_SWIGLU_CLAMP = 2 };

typedef struct BatonEngine BatonEngine;
typedef struct BatonMatrix BatonMatrix;
typedef struct BatonModel BatonModel;

// A weight as workers/ops/weights.py lays it: data is float, bf16, int8 or Q4 bytes; scale is float [N] for INT8,
// float16 [N, K/32] for Q8 and Q4; min is float16 [N, K/32] for Q4. Copied by baton_pack.
typedef struct {
    int64_t kind, n, k;
    const void *data, *scale, *min;
} BatonWeight;

// One layer's attention. Absent vectors are null, an absent window is 0, an absent softcap 0.
typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, window, rope_pairs, rope_positions;
    const float *cos, *sin;  // [rope_positions, rope_pairs]
    const float *q_norm, *k_norm, *sinks;
    float scale, softcap, norm_eps;
} BatonAttention;

typedef struct {
    int64_t first_row, num_tokens, first_position, first_entry, num_blocks;
} BatonSpan;

// Where the tokens of a step are: workers/ops/base.py, StepTables. An entry of `table` that only tokens before a window
// would need may be -1.
typedef struct {
    int64_t num_tokens, num_spans, num_entries;
    const int64_t *positions, *block_of, *slot_of, *table;
    const BatonSpan *spans;
} BatonTables;

// The cache of one layer, or of all layers one after the other: [blocks, 2, J, S, D] each.
typedef struct {
    void *data;
    int64_t num_blocks, block_tokens, is_bf16, key_is_dim_major;
} BatonCache;

typedef struct {
    BatonAttention attention;
    const BatonMatrix *qkv, *out, *gate_up, *down;
    const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
    const float *attention_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;
    int64_t activation;
} BatonLayer;

typedef struct {
    int64_t num_layers;
    const BatonLayer *layers;
    const BatonMatrix *embedding, *head;
    const float *norm;
    float embedding_scale, norm_eps, softcap;
} BatonDecoder;

// How one row is drawn: workers/sampling/sampler.py. temperature > 0; top_k 0, top_p 1 and min_p 0 are off.
typedef struct {
    int64_t row, top_k;
    double uniform;
    float temperature, top_p, min_p;
} BatonDraw;

// Called after each layer's K and V are written, on the calling thread; anything but 0 stops the step.
typedef int32_t (*BatonOnLayer)(int64_t layer);

BATON_EXPORT const char *baton_source_hash(void);
BATON_EXPORT int32_t baton_best_level(void);  // of this processor

// An engine with `num_threads` threads, the caller's included; null when the processor lacks `level`.
BATON_EXPORT BatonEngine *baton_open(int32_t level, int32_t num_threads);
BATON_EXPORT void baton_close(BatonEngine *engine);

BATON_EXPORT BatonMatrix *baton_pack(BatonEngine *engine, const BatonWeight *weight);  // null without memory
BATON_EXPORT void baton_free_matrix(BatonMatrix *matrix);
BATON_EXPORT int64_t baton_matrix_bytes(const BatonMatrix *matrix);

BATON_EXPORT int32_t baton_embed(BatonEngine *engine, const BatonMatrix *table, const int64_t *ids, int64_t num_tokens,
                                 float scale, float *out);
// x += delta in place where there is a delta; out = RMSNorm(x).
BATON_EXPORT int32_t baton_norm(BatonEngine *engine, float *x, const float *delta, const float *weight, float eps,
                                int64_t num_rows, int64_t width, float *out);
BATON_EXPORT int32_t baton_linear(BatonEngine *engine, const BatonMatrix *weight, const float *x, int64_t num_rows,
                                  const float *bias, float *out);
BATON_EXPORT int32_t baton_rotate_and_store(BatonEngine *engine, const BatonAttention *attention,
                                            const BatonTables *tables, const BatonCache *cache, const float *qkv,
                                            float *q);
BATON_EXPORT int32_t baton_attend(BatonEngine *engine, const BatonAttention *attention, const BatonTables *tables,
                                  const BatonCache *cache, const float *q, float *out);
BATON_EXPORT int32_t baton_activate(BatonEngine *engine, int64_t activation, const float *gate_up, int64_t num_rows,
                                    int64_t width, float *out);
BATON_EXPORT int32_t baton_softcap(BatonEngine *engine, float *x, int64_t num_rows, int64_t width, float cap);

// Each row's largest and the first place it stands at; NaN where the row has one.
BATON_EXPORT int32_t baton_find_largest(BatonEngine *engine, const float *logits, int64_t num_rows, int64_t width,
                                        float *largest, int64_t *places);
// tokens[i] is drawn from row draws[i].row of logits [rows, vocab]; each row has a finite maximum.
BATON_EXPORT int32_t baton_draw(BatonEngine *engine, const float *logits, int64_t vocab, const BatonDraw *draws,
                                int64_t num_draws, int64_t *tokens);

// Everything `decoder` points to, norm vectors and matrices, stays the caller's and must outlive the model.
BATON_EXPORT BatonModel *baton_make_model(BatonEngine *engine, const BatonDecoder *decoder);
BATON_EXPORT void baton_free_model(BatonModel *model);
// logits is [num_rows, vocab]; on_layer may be null.
BATON_EXPORT int32_t baton_step(BatonModel *model, const int64_t *ids, const int64_t *rows, int64_t num_rows,
                                const BatonTables *tables, const BatonCache *cache, BatonOnLayer on_layer,
                                float *logits);
// Nanoseconds that the calling thread spent per stage since the last call: rows, linears, attention, head.
BATON_EXPORT void baton_stage_ns(BatonModel *model, int64_t out[4]);

#ifdef __cplusplus
}
#endif
#endif
