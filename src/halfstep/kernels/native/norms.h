// Norms, their check and the update of the loss scale, as in `reference/operators.py` and `scale/rule.py`.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "threads.h"

namespace {

constexpr int64_t SUMMED = 4096;  // elements of a norm that are summed in fp32
constexpr int LANES = 64;         // sums side by side in them: enough for four vectors of 16
constexpr float CLIP_EPS = 1e-6f;

float norm_of(double squares) {  // inf where fp32 would have it
    return squares > FLT_MAX ? INFINITY : float(std::sqrt(squares));
}

}  // namespace

extern "C" {

// `columns` holds `tensors` sizes, as many types, as many addresses.
void halfstep_norms(float *norms, const int64_t *columns, int64_t tensors, const Threads *threads) {
    const int64_t *sizes = columns, *types = columns + tensors, *addresses = types + tensors;
    std::vector<int64_t> begins(tensors + 1);
    int64_t total = 0;
    for (int64_t n = 0; n < tensors; total += sizes[n++]) begins[n + 1] = begins[n] + (sizes[n] + SUMMED - 1) / SUMMED;
    std::vector<double> sums(begins[tensors]);
    auto size = [&](int64_t n) { return sizes[n]; };
    in_parallel(*threads, total, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[SUMMED];
        walk(tensors, size, begin, end, SUMMED, [&](int64_t n, int64_t from, int64_t to) {
            for (int64_t at = from; at < to; at += SUMMED) {
                int64_t count = std::min(SUMMED, to - at), i = 0;
                const float *x = widened(scratch, reinterpret_cast<void *>(addresses[n]), types[n], at, count);
                float lanes[LANES] = {};
                for (; i + LANES <= count; i += LANES)
                    for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
                for (int lane = 0; i < count; i++, lane++) lanes[lane] += x[i] * x[i];
                double sum = 0;
                for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
                sums[begins[n] + at / SUMMED] = sum;
            }
        });
    });
    for (int64_t n = 0; n < tensors; n++) {
        double squares = 0;
        for (int64_t block = begins[n]; block < begins[n + 1]; block++) squares += sums[block];
        norms[n] = norm_of(squares);
    }
}

void halfstep_check_norms(const float *norms, int64_t count, const float *divisor, const float *clip_norm, float *norm,
                    bool *bad, float *factor) {
    double squares = 0;
    for (int64_t n = 0; n < count; n++) squares += double(norms[n]) * norms[n];
    float whole = divisor ? *divisor : 1.0f;
    *norm = norm_of(squares) / whole;
    *bad = !std::isfinite(*norm);
    if (clip_norm) {
        float over = (*norm + CLIP_EPS) / *clip_norm;
        whole *= over < 1.0f ? 1.0f : over;
    }
    *factor = 1.0f / whole;
}

// Both of them, for a caller that has the columns packed already.
void halfstep_read(float *norms, const int64_t *columns, int64_t tensors, const Threads *threads, const float *divisor,
                   const float *clip_norm, float *norm, bool *bad, float *factor) {
    halfstep_norms(norms, columns, tensors, threads);
    halfstep_check_norms(norms, tensors, divisor, clip_norm, norm, bad, factor);
}

void halfstep_advance(float *scale, int32_t *good, int32_t *total, bool *alarm, bool found, double growth,
                      double backoff, int64_t interval, float floor, float ceiling) {
    *alarm = found && *scale <= floor;
    *total += found;
    *good = found ? 0 : *good + 1;
    if (found) {
        *scale = float(*scale * backoff);
    } else if (*good >= interval) {
        float raised = float(*scale * growth);
        if (std::isfinite(raised)) *scale = raised;
        *good = 0;
    }
    *scale = std::min(std::max(*scale, floor), ceiling);
}

}  // extern "C"
