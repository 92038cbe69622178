// Formats: numbers widened to fp32 and narrowed again, one by one and in whole pieces.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

enum Type : int64_t { FP32, BF16, FP16, INT16, FP64 };

// ------------------------------------------------------------------ bit patterns

inline uint32_t bits(float value) {
    uint32_t pattern;
    std::memcpy(&pattern, &value, 4);
    return pattern;
}

inline float real(uint32_t pattern) {
    float value;
    std::memcpy(&value, &pattern, 4);
    return value;
}

constexpr uint32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;

inline bool is_nan(uint32_t pattern) { return (pattern & MAGNITUDE) > INFINITE; }

struct Bf16 {
    static float widen(uint16_t low) { return real(uint32_t(low) << 16); }
    static uint16_t narrow(float value) {  // half to even
        uint32_t pattern = bits(value), odd = (pattern >> 16) & 1;
        return uint16_t((is_nan(pattern) ? pattern | 0x400000 : pattern + 0x7FFF + odd) >> 16);
    }
};

struct Fp16 {
    static float widen(uint16_t low) {
        uint32_t sign = uint32_t(low & 0x8000) << 16, moved = uint32_t(low & 0x7FFF) << 13;
        uint32_t normal = moved + ((127 - 15) << 23), special = normal + ((128 - 16) << 23);
        uint32_t subnormal = bits(real(moved + (113u << 23)) - real(113u << 23));  // 113 - 127: its exponent, -14
        uint32_t pattern = moved < 0x800000 ? subnormal : moved >= 0xF800000 ? special : normal;
        return real(pattern | sign);
    }
    static uint16_t narrow(float value) {  // half to even
        uint32_t pattern = bits(value), size = pattern & MAGNITUDE, odd = (size >> 13) & 1;
        uint32_t normal = (size - ((127 - 15) << 23) + 0xFFF + odd) >> 13;
        uint32_t subnormal = bits(real(size) + 0.5f) - bits(0.5f);  // the lowest bit of 0.5 is fp16's smallest number
        uint32_t special = is_nan(size) ? 0x7E00 : 0x7C00;
        uint32_t low = size >= 143u << 23 ? special : size < 113u << 23 ? subnormal : normal;  // 2**16 and 2**-14
        return uint16_t(low | ((pattern >> 16) & 0x8000));
    }
};

inline uint32_t mix(uint32_t word) {  // "lowbias32" of Chris Wellons (public domain)
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

inline uint16_t by_chance(float value, uint32_t noise) {  // to bf16; what is not finite stays (a NaN that was
    uint32_t pattern = bits(value);                        // worked out has its quiet bit, which bf16 keeps)
    return uint16_t((pattern + ((pattern & MAGNITUDE) < INFINITE ? noise : 0)) >> 16);
}

// ------------------------------------------------------------------ whole pieces

template <class Low>
void widen_all(float *__restrict wide, const uint16_t *__restrict low, int64_t count) {
    for (int64_t i = 0; i < count; i++) wide[i] = Low::widen(low[i]);
}

template <class Low>
void narrow_all(uint16_t *__restrict low, const float *__restrict wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) low[i] = Low::narrow(wide[i]);
}

void scramble(uint32_t *__restrict mixed, uint32_t at, int64_t count) {  // what all streams of noise share
    for (int64_t i = 0; i < count; i++) mixed[i] = mix(at + uint32_t(i));
}

void narrow_by_chance(uint16_t *__restrict low, const float *__restrict wide, const uint32_t *__restrict mixed,
                      int64_t count, uint32_t key) {
    for (int64_t i = 0; i < count; i++) low[i] = by_chance(wide[i], mix(key ^ mixed[i]) >> 16);
}

void join(float *__restrict wide, const uint16_t *__restrict low, const uint16_t *__restrict rest, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t upper = uint32_t(low[i]) << 16, lower = rest[i];
        uint32_t taken = is_nan(upper) ? 0 : (lower & 0x8000) << 1;  // rounding up had added it
        wide[i] = real((upper - taken) | lower);
    }
}

void split(uint16_t *__restrict low, uint16_t *__restrict rest, const float *__restrict wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t pattern = bits(wide[i]);
        low[i] = uint16_t((is_nan(pattern) ? pattern | 0x400000 : pattern + 0x8000) >> 16);
        rest[i] = uint16_t(pattern);
    }
}

template <class Low>
void add(float *__restrict wide, const uint16_t *__restrict low, const uint16_t *__restrict rest, int64_t count) {
    for (int64_t i = 0; i < count; i++) wide[i] = Low::widen(low[i]) + Low::widen(rest[i]);
}

template <class Low>
void compensate(uint16_t *__restrict low, uint16_t *__restrict rest, const float *__restrict wide, int64_t count) {
    auto lost = [](float value, float kept) {
        float difference = value - kept;
        uint32_t finite = (bits(difference) & MAGNITUDE) < INFINITE ? ~0u : 0;
        return Low::narrow(real(bits(difference) & finite));
    };
    for (int64_t i = 0; i < count; i++) {
        float kept = Low::widen(Low::narrow(wide[i])), sum = kept + Low::widen(lost(wide[i], kept));
        uint16_t again = Low::narrow(sum);  // settles ties: packing the sum once more gives the same two numbers
        low[i] = again;
        rest[i] = lost(sum, Low::widen(again));
    }
}

// `count` numbers from `at` on in fp32: where they are, or widened into `scratch`.
const float *widened(float *scratch, const void *memory, int64_t type, int64_t at, int64_t count) {
    if (type == FP32) return static_cast<const float *>(memory) + at;
    const uint16_t *low = static_cast<const uint16_t *>(memory) + at;
    type == BF16 ? widen_all<Bf16>(scratch, low, count) : widen_all<Fp16>(scratch, low, count);
    return scratch;
}

}  // namespace
