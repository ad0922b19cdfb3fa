#include "pool.h"

#include <sched.h>
#include <time.h>

namespace baton {
namespace {

constexpr int64_t SPIN_AFTER_NS = 200000;  // a wake-up costs tens of microseconds; the next decode step comes sooner
constexpr int SPINS_BEFORE_YIELD = 4000;  // some 50 microseconds: longer than a stage's imbalance, short for a shared core

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

void pause_briefly(int spins) {
    if (spins >= SPINS_BEFORE_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads) {
    for (int thread = 1; thread < num_threads; thread++) threads_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closing_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)> &body) {
    if (num_threads_ > 1) {
        body_ = &body;
        round_.fetch_add(1);    // in the one order with sleepers_: a helper sees the round, or we see the helper asleep
        if (sleepers_.load()) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
    }
    body(0);
    barrier();
}

void Pool::barrier() {
    if (num_threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) pause_briefly(spins);
}

bool Pool::await_round(uint64_t seen) {
    const int64_t end = now_ns() + SPIN_AFTER_NS;
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen; spins++) {
        pause_briefly(spins);
        if (spins % 64 == 63 && now_ns() > end) break;
    }
    if (round_.load(std::memory_order_acquire) != seen) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return is_closing_ || round_.load() != seen; });
    sleepers_.fetch_sub(1);
    return !is_closing_;
}

void Pool::serve(int thread) {
    for (uint64_t seen = 0; await_round(seen); seen++) {
        (*body_)(thread);
        barrier();
    }
}

}  // namespace baton
