// Cross entropy of rows of low logits, as in `reference/cross_entropy.py`: they come from memory once in the forward
// and once in the backward pass, and nothing wide is written but two or three sums a row. exp is within an ulp, sums are fp32
// over at most BLOCK classes and fp64 over these, and the numbers of a row that are no vector are fp64. A row is one
// thread's work, so results do not depend on the number of threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "formats.h"
#include "threads.h"

namespace {

constexpr int64_t BLOCK = 4096;     // classes that are summed in fp32
constexpr int WIDTH = 64;           // sums side by side in them
constexpr float SMALL = -87.3365f;  // exp(x) below is subnormal and taken as 0: gradients lose at most 2**-126

struct Logits {
    int64_t rows, classes, stride, type;
    const uint16_t *low;
    Threads threads;
};

inline float fused(float a, float b, float c) {  // a * b + c, rounded once where that is one instruction
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// e**x for x <= 0, 0 below SMALL, nan of nan: x = n ln 2 + r, e**r = 1 + r + r**2 q(r) with the q of degree 4 that has
// the least relative error, 3e-9, for |r| <= ln 2 / 2.
inline float exponential(float x) {
    float shifted = fused(x, 1.44269504f, 12582912.0f), n = shifted - 12582912.0f;  // 1.5 * 2**23: the last bits are n
    float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));  // ln 2 in two parts; n times the first is exact
    float q = fused(1.38145394e-3f, r, 8.36874545e-3f);
    q = fused(q, r, 4.16683890e-2f);
    q = fused(q, r, 1.66665211e-1f);
    q = fused(q, r, 4.99999940e-1f);
    float power = real((bits(shifted) << 23) + (127u << 23));
    return x < SMALL ? 0.0f : (fused(q, r * r, r) + 1.0f) * power;
}

// Numbers of a low format in the order of integers, and back; a nan is larger than all, or smaller.
inline int16_t ordered(int16_t low) { return low ^ ((low >> 15) & 0x7FFF); }

template <class Low>
float largest(const uint16_t *__restrict x, int64_t count) {
    int16_t lanes[WIDTH];
    std::fill_n(lanes, WIDTH, INT16_MIN);
    auto take = [&](int lane, int64_t at) { lanes[lane] = std::max(lanes[lane], ordered(int16_t(x[at]))); };
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        for (int lane = 0; lane < WIDTH; lane++) take(lane, i + lane);
    for (int lane = 0; i < count; i++, lane++) take(lane, i);
    return Low::widen(uint16_t(ordered(*std::max_element(lanes, lanes + WIDTH))));
}

// The sum of value(i) over all classes.
template <class Value>
double sum_of(int64_t count, const Value &value) {
    double sum = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t i = begin, end = std::min(begin + BLOCK, count);
        float lanes[WIDTH] = {};
        for (; i + WIDTH <= end; i += WIDTH)
            for (int lane = 0; lane < WIDTH; lane++) lanes[lane] += value(i + lane);
        for (int lane = 0; i < end; i++, lane++) lanes[lane] += value(i);
        for (int lane = 0; lane < WIDTH; lane++) sum += lanes[lane];
    }
    return sum;
}

inline double log_sum(double a, double b) {  // log(e**a + e**b)
    double high = a > b ? a : b, low = a > b ? b : a;
    return low == -INFINITY ? high : high + std::log1p(std::exp(low - high));
}

template <class Low>
void add_row(const uint16_t *__restrict x, int64_t classes, int64_t place, const float *by_class, double &lse,
             double &own, double &dot) {
    float top = largest<Low>(x, classes);
    float base = top == -INFINITY ? 0.0f : top;  // -inf minus itself would be nan
    double sum = sum_of(classes, [&](int64_t i) { return exponential(Low::widen(x[i]) - base); });
    lse = log_sum(lse, base + std::log(sum));
    if (place >= 0 && place < classes) own = Low::widen(x[place]);
    if (by_class) dot += sum_of(classes, [&](int64_t i) { return by_class[i] * Low::widen(x[i]); });
}

struct Row {  // of `Shares`, with the log of the sum of its exponentials
    double lse;
    int64_t label;  // less the first class of the part
    float own, every, scale;
    const float *by_class;
};

// `out` may be `x`: each block of it is read before it is written.
template <class Low>
void gradient_of(uint16_t *out, const uint16_t *x, int64_t classes, const Row &row) {
    float base = float(row.lse), scale = row.scale;
    double every = row.every * std::exp(base - row.lse);
    float factor = float(every);
    const float *by_class = row.by_class;
    bool here = row.label >= 0 && row.label < classes;
    double own = here ? every * exponential(Low::widen(x[row.label]) - base) - row.own : 0;
    if (here && by_class) own -= double(scale) * by_class[row.label];
    for (int64_t begin = 0; begin < classes; begin += BLOCK) {
        float e[BLOCK];
        int64_t many = std::min(BLOCK, classes - begin);
        const uint16_t *from = x + begin;
        uint16_t *into = out + begin;
        for (int64_t i = 0; i < many; i++) e[i] = exponential(Low::widen(from[i]) - base) * factor;
        if (by_class)
            for (int64_t i = 0; i < many; i++) e[i] -= scale * by_class[begin + i];
        for (int64_t i = 0; i < many; i++) into[i] = Low::narrow(e[i]);
    }
    if (here) out[row.label] = Low::narrow(float(own));
}

}  // namespace

extern "C" {

// Adds the logits of the classes from `first` on to the sums of their rows, which begin with class 0.
void halfstep_row_sums(double *lse, double *own, double *dot, const Logits *logits, const int64_t *target,
                       const float *by_class, int64_t first) {
    in_parallel(logits->threads, logits->rows, [&](int64_t begin, int64_t end) {
        auto *add = logits->type == BF16 ? add_row<Bf16> : add_row<Fp16>;
        const float *shares = by_class ? by_class + first : nullptr;
        for (int64_t n = begin; n < end; n++) {
            if (first == 0) lse[n] = -INFINITY, own[n] = NAN, dot[n] = 0;
            const uint16_t *x = logits->low + n * logits->stride;
            add(x, logits->classes, target[n] - first, shares, lse[n], own[n], dot[n]);
        }
    });
}

// Writes the gradients of the logits to rows of `out`, `stride` apart.
void halfstep_slope(const Logits *logits, const double *lse, const int64_t *label, const float *own,
                    const float *every, const float *scale, const float *by_class, int64_t first, uint16_t *out,
                    int64_t stride) {
    in_parallel(logits->threads, logits->rows, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            Row row{lse[n], label[n] - first, own[n], every[n], scale[n], by_class ? by_class + first : nullptr};
            auto *gradient = logits->type == BF16 ? gradient_of<Bf16> : gradient_of<Fp16>;
            gradient(out + n * stride, logits->low + n * logits->stride, logits->classes, row);
        }
    });
}

}  // extern "C"
