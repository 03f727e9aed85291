// Copies numbers from pinned memory of the host; `address` has the halves of its address. Each
// thread copies four.
struct alignas(16) Four {
  int at[4];
};
const Four* from = (const Four*)((unsigned long long)address[1] << 32 | address[0]);
((Four*)numbers)[thread_position_in_grid.x] = from[thread_position_in_grid.x];
