// A dense decoder with the buffers of its steps, and one request to compute a step.
#pragma once
#include <time.h>

#include "engine.h"

namespace baton {

enum Stage { ROWS, LINEARS, ATTENTION, HEAD };

// What one thread keeps for itself where every thread does the row work of all rows.
struct Lane {
    Buffer x, kept, normed;
    RoundedBuffers rounded;
    float *live = nullptr;      // the rows that go on: x, and from the last layer's attention on `kept`
    int64_t num_live = 0;
};

struct Request {
    const int64_t *ids, *rows;
    int64_t num_rows;
    const BatonTables *tables;
    const BatonCache *cache;
    BatonOnLayer on_layer;
    float *logits;
};

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

}  // namespace baton

struct BatonModel {
    BatonEngine *engine;
    BatonDecoder decoder;
    std::vector<BatonLayer> layers;
    int64_t width, widest_input;
    baton::Buffer x, kept, delta, normed, qkv, attended, gate_up;
    baton::RoundedBuffers rounded;
    std::vector<baton::Lane> lanes;     // one per thread
    int64_t stage_ns[4] = {0, 0, 0, 0};
};

namespace baton {

void reserve_buffers(BatonModel &model, const Request &request);

// The cache of one layer, out of that of all.
BatonCache cache_of(const BatonCache &all, const BatonAttention &attention, int64_t layer);

// A step of so few rows that threads would wait for each other longer than each needs to do all of the row work.
bool are_few(const BatonModel &model, const Request &request);
// False when the listener stopped it.
bool step_few(BatonModel &model, const Request &request);

}  // namespace baton
