// One thread copies 16 bytes of one block: within the pools, out of them into `contents`, or from
// there into them. `contents` has one row a block, its key bytes before its value bytes. A pool that
// is read only is ordered by `token` too, because the next write must wait for the read; see the
// write kernel.
typedef Chunk<unsigned, 4> Piece;
constexpr int KEY_CHUNKS = KEY_BYTES / 16;
constexpr int CHUNKS = KEY_CHUNKS + VALUE_BYTES / 16;
const Place thread_index = thread_position_in_grid.x;
const Place pair = thread_index / CHUNKS;
const int chunk = thread_index % CHUNKS;
const bool is_key = chunk < KEY_CHUNKS;
const int size = is_key ? KEY_CHUNKS : CHUNKS - KEY_CHUNKS;
const int at = is_key ? chunk : chunk - KEY_CHUNKS;
device Piece* pool = (device Piece*)(is_key ? key_pool : value_pool);
#if FROM_POOL
if (pair < sources_shape[0]) {
  const Piece piece = pool[(Place)sources[pair] * size + at];
#else
if (pair < targets_shape[0]) {
  const Piece piece = ((const device Piece*)contents)[thread_index];
#endif
#if TO_POOL
  pool[(Place)targets[pair] * size + at] = piece;
#else
  ((device Piece*)contents)[thread_index] = piece;
#endif
}
if (thread_index == 0) {
  token[0] = previous[0] + 1;
}
