// One thread copies 16 bytes of one block in place; see the write kernel.
typedef Chunk<unsigned, 4> Piece;
constexpr int KEY_CHUNKS = KEY_BYTES / 16;
constexpr int CHUNKS = KEY_CHUNKS + VALUE_BYTES / 16;
const Place thread_index = thread_position_in_grid.x;
const int pair = thread_index / CHUNKS;
const int chunk = thread_index % CHUNKS;
if (pair < sources_shape[0]) {
  const Place from = sources[pair];
  const Place to = targets[pair];
  if (chunk < KEY_CHUNKS) {
    device Piece* pool = (device Piece*)key_pool;
    pool[to * KEY_CHUNKS + chunk] = pool[from * KEY_CHUNKS + chunk];
  } else {
    constexpr int VALUE_CHUNKS = VALUE_BYTES / 16;
    device Piece* pool = (device Piece*)value_pool;
    const int at = chunk - KEY_CHUNKS;
    pool[to * VALUE_CHUNKS + at] = pool[from * VALUE_CHUNKS + at];
  }
}
if (thread_index == 0) {
  token[0] = previous[0] + 1;
}
