#include "pool.h"

#include <sched.h>

namespace baton {
namespace {

constexpr int SPINS_BEFORE_YIELD = 4000;  // some 50 microseconds: longer than a stage's imbalance, short for a shared core

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
        {
            std::lock_guard<std::mutex> lock(mutex_);
            body_ = &body;
            round_++;
        }
        wake_.notify_all();
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

void Pool::serve(int thread) {
    uint64_t seen = 0;
    for (;;) {
        const std::function<void(int)> *body;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return is_closing_ || round_ != seen; });
            if (is_closing_) return;
            seen = round_;
            body = body_;
        }
        (*body)(thread);
        barrier();
    }
}

}  // namespace baton
