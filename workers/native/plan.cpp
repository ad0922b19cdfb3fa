// What a step needs to know before its threads start, and the room it needs.
#include <algorithm>

#include "model.h"

namespace baton {
namespace {

constexpr int64_t FEW_ROWS = 2;     // a row takes each thread what a meeting takes

bool asks_every_row(const Request &r) {
    if (r.num_rows != r.tables->num_tokens) return false;
    for (int64_t i = 0; i < r.num_rows; i++)
        if (r.rows[i] != i) return false;
    return true;
}

}  // namespace

Plan make_plan(const BatonModel &model, const Request &request) {
    const BatonTables &tables = *request.tables;
    const BatonAttention &a = model.layers[0].attention;    // layers differ in rope and window at most
    Plan plan;
    plan.units = plan_units(tables, a);
    plan.are_rows_few = std::max(tables.num_tokens, request.num_rows) <= FEW_ROWS;
    plan.are_units_whole = (int64_t)plan.units.size() == tables.num_spans * a.num_kv_heads;
    plan.are_units_grouped = a.num_heads / a.num_kv_heads * a.head_dim % GROUP == 0;
    plan.drops_rows = !asks_every_row(request);
    for (int64_t i = 0; plan.drops_rows && i < request.num_rows; i++)
        for (int64_t head = 0; head < a.num_kv_heads; head++)
            plan.last_units.push_back(plan_unit(tables, request.rows[i], head, i));
    return plan;
}

}  // namespace baton

using namespace baton;

void BatonModel::reserve(const Request &request, const Plan &plan) {
    const int64_t tokens = request.tables->num_tokens, rows = std::max(tokens, request.num_rows);
    int64_t widest_qkv = 0, widest_gate_up = 0, head_dim = 0;
    for (const BatonLayer &layer : layers) {
        widest_qkv = std::max(widest_qkv, layer.qkv->view.n);
        widest_gate_up = std::max(widest_gate_up, layer.gate_up->view.n);
        head_dim = std::max(head_dim, layer.attention.head_dim);
    }
    lanes.resize((size_t)engine->pool.size());
    for (Lane &lane : lanes) {
        lane.x.reserve(tokens * width * 4);
        lane.kept.reserve(rows * width * 4);
        lane.normed.reserve(rows * width * 4);
        lane.rounded.reserve(rows, round_up(width, GROUP));
        if (!plan.are_rows_few) break;
    }
    delta.reserve(rows * width * 4);
    qkv.reserve(tokens * widest_qkv * 4);
    gate_up.reserve(rows * widest_gate_up * 4);
    inner.reserve(rows * widest_input * 4);
    rounded_inner.reserve(rows, round_up(widest_input, GROUP));
    engine->reserve_scratch(std::max(linear_scratch_bytes(widest_input),
                                     attention_scratch_bytes(longest_context(*request.tables), head_dim)));
}
