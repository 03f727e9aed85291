// Packed weights as mx.quantize makes them, from the least significant bit of a word up. A group of
// numbers shares a scale and a bias.

// What turns numbers of a group into values: pairs of 16 bits for numbers of 4, float32 for 8.
struct Group {
  unsigned scale;
  unsigned bias;
};

inline float widened(unsigned bits, __nv_bfloat16) {
  return __uint_as_float(bits << 16);
}

inline float widened(unsigned bits, __half) {
  return float(__ushort_as_half((unsigned short)bits));
}

inline unsigned twice(unsigned bits) {
  return bits | bits << 16;
}

// Returns a number times SiLU of its gate (SwiGLU). Both are rounded first; roundings are those of
// MLX's operations, but of a reciprocal and a power that are the device's approximate ones.
template <typename T>
inline T gated(float gate, float number, T) {
  const float x = float(T(gate));
  const float sigmoid = float(T(reciprocal(1.0f + power(-x * 1.4426950408889634f))));
  return T(float(T(x * sigmoid)) * float(T(number)));
}

// What is added to levels from 0 to 15, so that they are the last bits of a number; and two ones.
template <typename T>
struct Raised;

template <>
struct Raised<__nv_bfloat16> {
  static constexpr unsigned BY = 0x43004300u;     // 128
  static constexpr unsigned BACK = 0xc300c300u;   // -128
  static constexpr unsigned ONES = 0x3f803f80u;
  static constexpr float SUM = 128.0f;
};

template <>
struct Raised<__half> {
  static constexpr unsigned BY = 0x64006400u;     // 1,024
  static constexpr unsigned BACK = 0xe400e400u;   // -1,024
  static constexpr unsigned ONES = 0x3c003c00u;
  static constexpr float SUM = 1024.0f;
};

// The other bytes of 32,768 + a byte as a float32.
constexpr unsigned BYTES = 0x47000000u;
// The bits of two numbers in a word.
constexpr unsigned LEVELS = 0x000f000fu;

template <typename T>
struct Affine4 {
  using Scale = unsigned short;
  static constexpr int ARRAYS = 2;  // scales and biases

  static Group group(unsigned scale, unsigned bias) {
    return {twice(scale), twice(bias)};
  }

  // The values of two numbers in the lowest 4 bits of both halves of a word; `mask` is LEVELS.
  static unsigned two(unsigned word, Group group, unsigned mask) {
    using By = Raised<T>;
    const unsigned levels = multiply_add((word & mask) | By::BY, By::ONES, By::BACK, T(0.0f));
    return multiply_add(levels, group.scale, group.bias, T(0.0f));
  }
};

// Numbers are E2M1, scales powers of two (E8M0).
template <typename T>
struct Mxfp4 {
  using Scale = unsigned char;
  static constexpr int ARRAYS = 1;

  static Group group(unsigned scale, unsigned) {
    return {twice(scale ? scale << 7 : 0x40), 0x80008000u};
  }

  // Two numbers before they are scaled.
  static unsigned two(unsigned word) {
    // Exponent and mantissa as those of a bfloat16 are 2^126 times too small.
    const unsigned tiny = (word & 0x00070007u) << 6 | (word & 0x00080008u) << 12;
    return multiply_add(tiny, 0x7e807e80u, 0x80008000u, T(0.0f));
  }

  static unsigned two(unsigned word, Group group, unsigned) {
    return multiply_add(two(word), group.scale, group.bias, T(0.0f));
  }
};

template <typename T>
struct Affine8 {
  using Scale = unsigned short;
  static constexpr int ARRAYS = 2;

  static Group group(unsigned scale, unsigned bias) {
    const float factor = widened(scale, T(0.0f));
    const float start = widened(bias, T(0.0f)) - 32768.0f * factor;
    return {__float_as_uint(factor), __float_as_uint(start)};
  }

  // The values of a byte of each word; a selector is 0x7404 plus 16 times the byte's place, and
  // `bytes` is BYTES.
  static unsigned two(
      unsigned low, unsigned high, unsigned low_selector, unsigned high_selector, Group group,
      unsigned bytes) {
    const float scale = __uint_as_float(group.scale);
    const float start = __uint_as_float(group.bias);
    // 32,768 + number has the number in its second byte.
    const float first = __uint_as_float(__byte_perm(low, bytes, low_selector));
    const float second = __uint_as_float(__byte_perm(high, bytes, high_selector));
    return packed(first * scale + start, second * scale + start, T(0.0f));
  }
};
