// Declarations that both kernels share. They stand before the generated function. Comments and
// indentation are stripped before compilation, because MLX hashes the whole text at every call.

typedef long Place;  // an index into logits: more than 2^31 elements

constant constexpr float LOG2_E = 1.4426950408889634f;

// N neighbouring elements that are read at once.
template <typename S, int N>
struct alignas(sizeof(S) * N) Chunk {
  S at[N];
};

// Maps a number to an integer key of the same order, and back. Both zeros have the same key. The
// last `drop` bits, which are always 0 in numbers of 16 bits, are left out.
inline unsigned order(float number, int drop) {
  const unsigned bits = as_type<unsigned>(number);
  const unsigned plain = bits == 0x80000000u ? 0u : bits;
  return (plain >> 31 ? ~plain : plain | 0x80000000u) >> drop;
}

inline float number_of(unsigned key, int drop) {
  const unsigned whole = key << drop;
  const bool is_positive = whole >> 31;
  return as_type<float>(is_positive ? whole & 0x7fffffffu : ~(whole | ((1u << drop) - 1u)));
}

// Maps a number of a row that may have NaN: each of them has the largest key, as in MLX's argmax.
inline unsigned order_nan(float number, int drop) {
  const bool is_nan = as_type<unsigned>(number) << 1 > 0xff000000u;
  return is_nan ? 0xffc00000u >> drop : order(number, drop);
}

// Returns the smallest key, up to `most`, whose number over the temperature is at least `least`.
inline unsigned first_key(float least, float temperature, unsigned most, int drop) {
  unsigned below = 0;
  unsigned found = most;
  while (found - below > 1) {
    const unsigned middle = below + (found - below) / 2;
    if (number_of(middle, drop) / temperature >= least) {
      found = middle;
    } else {
      below = middle;
    }
  }
  return found;
}

// Computes one round of Threefry-2x32 (Salmon et al., SC 2011).
inline void mix(thread Chunk<unsigned, 2>& words, int turn) {
  words.at[0] += words.at[1];
  words.at[1] = (words.at[1] << turn | words.at[1] >> (32 - turn)) ^ words.at[0];
}

// Computes 20 rounds: MLX's random bits of a key at two places.
inline Chunk<unsigned, 2> random_bits(unsigned key, unsigned key2, unsigned place, unsigned place2) {
  const unsigned keys[3] = {key, key2, key ^ key2 ^ 0x1bd11bdau};
  Chunk<unsigned, 2> words = {{place + key, place2 + key2}};
#pragma unroll
  for (int i = 0; i < 5; i++) {
    mix(words, i % 2 ? 17 : 13);
    mix(words, i % 2 ? 29 : 15);
    mix(words, i % 2 ? 16 : 26);
    mix(words, i % 2 ? 24 : 6);
    words.at[0] += keys[(i + 1) % 3];
    words.at[1] += keys[(i + 2) % 3] + i + 1;
  }
  return words;
}

// Returns MLX's Gumbel noise, bit for bit, from a uniform number below 1.
inline float gumbel(unsigned bits) {
  const float uniform = fmin(float(bits) / 4294967296.0f, 0.99999994f);
  return -precise::log(-precise::log(uniform));
}
