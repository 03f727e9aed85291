// One threadgroup merges the items of one query row and head. The warps take the items in turn; a
// lane has every 32nd element.
constexpr int EACH = (V + 31) / 32;
const int thread_index = thread_index_in_threadgroup;
const int lane = thread_index % 32;
const int warp = thread_index / 32;
const int row = threadgroup_position_in_grid.x / HEADS;
const int head = threadgroup_position_in_grid.x % HEADS;
const int first = spans[row * 2];
const int end = first + spans[row * 2 + 1];

// 1. Merge a warp's items as a running softmax.
float most = LEAST;
float total = 0.0f;
float sums[EACH];
#pragma unroll
for (int e = 0; e < EACH; e++) {
  sums[e] = 0.0f;
}
for (int item = first + warp; item < end; item += WARPS) {
  const Place place = (Place)item * HEADS + head;
  const float their_most = part_stats[place * 2];
  const float larger = fmax(most, their_most);
  const float keep = exp2(most - larger);
  const float join = exp2(their_most - larger);
  most = larger;
  total = total * keep + part_stats[place * 2 + 1] * join;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int d = e * 32 + lane;
    if (d < V) {
      sums[e] = sums[e] * keep + part_sums[place * V + d] * join;
    }
  }
}

// 2. Merge the warps.
threadgroup float warp_most[WARPS];
threadgroup float warp_total[WARPS];
threadgroup float warp_sums[WARPS][V];
if (lane == 0) {
  warp_most[warp] = most;
  warp_total[warp] = total;
}
#pragma unroll
for (int e = 0; e < EACH; e++) {
  const int d = e * 32 + lane;
  if (d < V) {
    warp_sums[warp][d] = sums[e];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float all_most = warp_most[0];
#pragma unroll
for (int w = 1; w < WARPS; w++) {
  all_most = fmax(all_most, warp_most[w]);
}
#if SINKS
const float sink = float(sinks[head]) * LOG2_E;
all_most = fmax(all_most, sink);
float all_total = exp2(sink - all_most);
#else
float all_total = 0.0f;
#endif
float join[WARPS];
#pragma unroll
for (int w = 0; w < WARPS; w++) {
  join[w] = exp2(warp_most[w] - all_most);
  all_total += warp_total[w] * join[w];
}
const Place out = (Place)row * HEADS + head;
for (int d = thread_index; d < V; d += WARPS * 32) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    sum += warp_sums[w][d] * join[w];
  }
  output[out * V + d] = T(sum / all_total);
}
