// 16-bit floating point numbers, rounded to nearest even as GPUs do.
#pragma once

#include <stdint.h>
#include <string.h>

namespace shim {

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct Bfloat {
  uint16_t bits;
  Bfloat() = default;
  explicit Bfloat(float value) {
    const uint32_t all = bits_of(value);
    const bool is_nan = (all & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? 0x7fc0 : (all + 0x7fff + (all >> 16 & 1)) >> 16;
  }
  explicit operator float() const { return float_of((uint32_t)bits << 16); }
};

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float value) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000, all = bits_of(value) & 0x7fffffff;
    if (all > 0x7f800000) {
      bits = sign | 0x7e00;
    } else if (all >= 0x477ff000) {
      bits = sign | 0x7c00;
    } else if (all < 0x38800000) {  // below 2^-14: the adder rounds at 2^-24
      bits = sign | (bits_of(float_of(all) + 0.5f) - bits_of(0.5f));
    } else {
      bits = sign | ((all - 0x38000000 + 0xfff + (all >> 13 & 1)) >> 13);
    }
  }
  explicit operator float() const {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    const float size = float_of(rest << 13) * 0x1p112f;
    return sign ? -size : size;
  }
};

}  // namespace shim
