// A dense decoder with the buffers of its steps, and one request to compute a step.
#pragma once
#include "engine.h"

namespace baton {

enum Stage { ROWS, LINEARS, ATTENTION, HEAD };

// The residual stream and what a linear reads of it: one for all threads, or one each.
struct Lane {
    Buffer x, kept, normed;     // kept: x of the asked rows, from the last layer's attention on
    RoundedBuffers rounded;
};

struct Request {
    const int64_t *ids, *rows;
    int64_t num_rows;
    const BatonTables *tables;
    const BatonCache *cache;
    BatonOnLayer on_layer;
    float *logits;
};

// How a step goes, the same for all of its threads.
struct Plan {
    bool are_rows_few;          // every thread adds, norms and rounds all rows for itself: sooner done than met for
    bool are_units_whole;       // a unit is all of a request at one KV head: nobody else reads what it turns and stores
    bool are_units_grouped;     // what a unit writes is whole groups of 32: it rounds them
    bool drops_rows;            // the last layer goes on with the asked rows alone
    std::vector<AttentionUnit> units, last_units;
};

Plan make_plan(const BatonModel &model, const Request &request);

}  // namespace baton

struct BatonModel {
    BatonEngine *engine;
    BatonDecoder decoder;
    std::vector<BatonLayer> layers;
    int64_t width, widest_input;
    std::vector<baton::Lane> lanes;                 // one per thread; the first alone where rows are many
    baton::Buffer delta, qkv, gate_up;
    baton::Buffer inner;                            // what attention leaves for `out`, and the activation for `down`
    baton::RoundedBuffers rounded_inner;
    std::vector<std::atomic<int64_t>> next_unit;    // one per layer
    int64_t stage_ns[4] = {0, 0, 0, 0};

    void reserve(const baton::Request &request, const baton::Plan &plan);    // throws std::bad_alloc
};
