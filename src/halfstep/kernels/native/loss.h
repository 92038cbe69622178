// Cross entropy of rows of low logits, as in `reference/cross_entropy.py`: they come from memory once in the forward
// and once in the backward pass, and nothing wide is written but a loss a row. exp is within an ulp, sums are fp32
// over at most BLOCK classes and fp64 over these, and the numbers of a row that are no vector are fp64. A row is one
// thread's work, so results do not depend on the number of threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

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

template <class Low>
float loss_of(const uint16_t *__restrict x, int64_t classes, int64_t label, const float *weight, double smoothing) {
    float top = largest<Low>(x, classes);
    double lse = std::log(sum_of(classes, [&](int64_t i) { return exponential(Low::widen(x[i]) - top); }));
    double loss = (lse - (Low::widen(x[label]) - top)) * (weight ? weight[label] : 1.0);  // all less `top`
    if (!smoothing) return float(loss);
    double weights = weight ? sum_of(classes, [&](int64_t i) { return weight[i]; }) : double(classes);
    double dot = weight ? sum_of(classes, [&](int64_t i) { return weight[i] * (Low::widen(x[i]) - top); })
                        : sum_of(classes, [&](int64_t i) { return Low::widen(x[i]) - top; });
    return float((1.0 - smoothing) * loss + smoothing / classes * (weights * lse - dot));
}

struct Row {  // of `Shares`
    int64_t label;
    float own, every, scale;
    const float *by_class;
};

template <class Low>
void gradient_of(uint16_t *__restrict out, const uint16_t *__restrict x, float *__restrict e, int64_t classes,
                 const Row &row) {
    if (row.label < 0 || row.label >= classes) {  // as in Triton; the losses have refused it
        std::fill_n(out, classes, Low::narrow(NAN));
        return;
    }
    float top = largest<Low>(x, classes);
    double sum = sum_of(classes, [&](int64_t i) { return e[i] = exponential(Low::widen(x[i]) - top); });
    double every = row.every / sum, own = every * e[row.label] - row.own;
    float factor = float(every), scale = row.scale;
    if (const float *by_class = row.by_class) {
        for (int64_t i = 0; i < classes; i++) out[i] = Low::narrow(e[i] * factor - scale * by_class[i]);
        own -= double(scale) * by_class[row.label];
    } else {
        for (int64_t i = 0; i < classes; i++) out[i] = Low::narrow(e[i] * factor);
    }
    out[row.label] = Low::narrow(float(own));
}

}  // namespace

extern "C" {

// Returns the first row whose target is no class, or -1; the losses are complete only then.
int64_t halfstep_losses(const Logits *logits, const int64_t *target, const float *weight, int64_t ignored,
                        double smoothing, float *losses) {
    int64_t classes = logits->classes, wrong = logits->rows;
    for (int64_t n = logits->rows; n-- > 0;)
        if (target[n] != ignored && (target[n] < 0 || target[n] >= classes)) wrong = n;
    if (wrong < logits->rows) return wrong;
    in_parallel(logits->threads, logits->rows, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++) {
            const uint16_t *x = logits->low + n * logits->stride;
            losses[n] = target[n] == ignored ? 0.0f
                        : logits->type == BF16
                            ? loss_of<Bf16>(x, classes, target[n], weight, smoothing)
                            : loss_of<Fp16>(x, classes, target[n], weight, smoothing);
        }
    });
    return -1;
}

// Writes the gradients of the logits, whose rows then lie one behind the other, to `out`.
void halfstep_slope(const Logits *logits, const int64_t *label, const float *own, const float *every,
                    const float *scale, const float *by_class, uint16_t *out) {
    int64_t classes = logits->classes;
    in_parallel(logits->threads, logits->rows, [&](int64_t begin, int64_t end) {
        if (begin == end) return;
        std::unique_ptr<float[]> scratch(new float[classes]);
        for (int64_t n = begin; n < end; n++) {
            const uint16_t *x = logits->low + n * logits->stride;
            Row row{label[n], own[n], every[n], scale[n], by_class};
            auto *gradient = logits->type == BF16 ? gradient_of<Bf16> : gradient_of<Fp16>;
            gradient(out + n * classes, x, scratch.get(), classes, row);
        }
    });
}

}  // extern "C"
