// One call of the kernels without torch, so that they run wherever a compiler reaches:
//
//     run_call                       prints the instruction set that the dispatch picks
//     run_call OP FIELDS BLOB OUT    runs an operator: attend, attend_backward, reshape_and_cache,
//                                    or merge_states
//
// FIELDS holds lines "member value" for members of the struct that the operator's kernel takes. The
// value of a pointer is an offset into BLOB, the memory that the call works on. OUT is written:
// attend and merge_states write the output and then the lse, reshape_and_cache all of the memory, a
// backward its results one after the other, the gradient of a bias of one head in float32.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/backward_plan.h"
#include "core/schedule.h"
#include "kernels.h"

namespace {

using namespace paged_attn;

void set(int64_t& field, const char* text, char*) { field = strtoll(text, nullptr, 0); }
void set(uint32_t& field, const char* text, char*) { field = strtoul(text, nullptr, 0); }
void set(bool& field, const char* text, char*) { field = *text == '1'; }
void set(float& field, const char* text, char*) { field = strtof(text, nullptr); }
void set(double& field, const char* text, char*) { field = strtod(text, nullptr); }
void set(DType& field, const char* text, char*) { field = DType(atoi(text)); }
template <class T>
void set(T*& field, const char* text, char* blob) {
  field = reinterpret_cast<T*>(blob + strtoll(text, nullptr, 0));
}

#define MEMBER(member) \
  if (name == #member) return set(call.member, text, blob);
#define STRIDED(member) MEMBER(member.data) MEMBER(member.stride0) MEMBER(member.stride1)
#define KEY_VALUE(member) \
  MEMBER(member.data)     \
  MEMBER(member.stride_page) MEMBER(member.stride_head) MEMBER(member.stride_token)
#define CACHE_WRITE(member)                                                                      \
  MEMBER(member.from) MEMBER(member.from_stride_token) MEMBER(member.from_stride_head)           \
  MEMBER(member.to)                                                                              \
  MEMBER(member.to_stride_page) MEMBER(member.to_stride_head) MEMBER(member.to_stride_token)     \
  MEMBER(member.from_dtype) MEMBER(member.to_dtype) MEMBER(member.head_dim) STRIDED(member.scale) \
  MEMBER(member.streamed)
#define PART(member)                                                                          \
  MEMBER(member.out)                                                                          \
  MEMBER(member.stride_token) MEMBER(member.stride_head) MEMBER(member.stride_dim)            \
  MEMBER(member.lse) MEMBER(member.lse_stride_head) MEMBER(member.lse_stride_token)

void set(Attention& call, const std::string& name, const char* text, char* blob) {
  MEMBER(q_dtype) MEMBER(kv_dtype) MEMBER(v_dtype) MEMBER(out_dtype) MEMBER(bias_dtype)
  MEMBER(batch) MEMBER(total_q) MEMBER(num_heads) MEMBER(num_kv_heads)
  MEMBER(head_dim) MEMBER(head_dim_v) MEMBER(num_groups) MEMBER(group_size)
  MEMBER(q) MEMBER(q_stride_token) MEMBER(q_stride_head)
  KEY_VALUE(k) KEY_VALUE(v) MEMBER(page_size) MEMBER(num_pages)
  STRIDED(cu_seqlens_q) STRIDED(cu_seqlens_k) STRIDED(seqused_k) STRIDED(block_table)
  STRIDED(alibi_slopes) STRIDED(q_descale) STRIDED(k_descale) STRIDED(v_descale) STRIDED(sinks)
  MEMBER(out_scale)
  MEMBER(bias) MEMBER(bias_stride_head) MEMBER(bias_stride_query) MEMBER(bias_stride_key)
  MEMBER(softmax_scale) MEMBER(softcap) MEMBER(window_left) MEMBER(window_right)
  MEMBER(batch_invariant)
  MEMBER(dropout.enabled) MEMBER(dropout.seed[0]) MEMBER(dropout.seed[1]) MEMBER(dropout.offset)
  MEMBER(dropout.threshold) MEMBER(dropout.keep_scale)
  MEMBER(layout.crow) MEMBER(layout.crow_batch) MEMBER(layout.crow_head) MEMBER(layout.crow_row)
  MEMBER(layout.col) MEMBER(layout.col_batch) MEMBER(layout.col_head) MEMBER(layout.col_entry)
  MEMBER(layout.num_heads) MEMBER(layout.rows) MEMBER(layout.nnz)
  MEMBER(layout.q_block_size) MEMBER(layout.k_block_size)
  throw std::runtime_error("no such member: " + name);
}

void set(ReshapeAndCache& call, const std::string& name, const char* text, char* blob) {
  CACHE_WRITE(key) CACHE_WRITE(value)
  MEMBER(slots) MEMBER(slot_stride) MEMBER(slots_are_int64)
  MEMBER(num_tokens) MEMBER(num_heads) MEMBER(page_size) MEMBER(num_slots) MEMBER(residues)
  throw std::runtime_error("no such member: " + name);
}

struct MergeCall : MergeStates {
  Part both[2];
};

void set(MergeCall& call, const std::string& name, const char* text, char* blob) {
  MEMBER(dtype) MEMBER(out_dtype) MEMBER(total_q) MEMBER(num_heads) MEMBER(head_dim_v)
  PART(both[0]) PART(both[1])
  throw std::runtime_error("no such member: " + name);
}

// What the operator takes from its tensors' shapes besides.
struct BackwardCall : Backward {
  int64_t total_k, bias_heads, bias_keys;
};

void set(BackwardCall& call, const std::string& name, const char* text, char* blob) {
  if (name.rfind("forward.", 0) == 0) return set(call.forward, name.substr(8), text, blob);
  MEMBER(dout) MEMBER(dout_stride_token) MEMBER(dout_stride_head)
  MEMBER(out) MEMBER(out_stride_token) MEMBER(out_stride_head)
  STRIDED(lse) STRIDED(dlse) MEMBER(total_k) MEMBER(bias_heads) MEMBER(bias_keys)
  throw std::runtime_error("no such member: " + name);
}

FILE* open_file(const char* path, const char* mode) {
  FILE* file = fopen(path, mode);
  if (file == nullptr) throw std::runtime_error(std::string("cannot open ") + path);
  return file;
}

std::vector<char> read_file(const char* path) {
  FILE* file = open_file(path, "rb");
  std::vector<char> bytes;
  char buffer[65536];
  while (size_t n = fread(buffer, 1, sizeof buffer, file))
    bytes.insert(bytes.end(), buffer, buffer + n);
  fclose(file);
  return bytes;
}

template <class Call>
Call read_fields(const char* path, char* blob) {
  Call call = {};
  FILE* file = open_file(path, "r");
  char name[64], text[64];
  while (fscanf(file, "%63s %63s", name, text) == 2) set(call, name, text, blob);
  fclose(file);
  return call;
}

// The output and the lse of a call; all bits set: NaN wherever nothing is written.
template <class Call>
struct Results {
  std::vector<char> out;
  std::vector<float> lse;

  Results(Call& call, DType dtype)
      : out(call.total_q * call.num_heads * call.head_dim_v * bytes_of(dtype), -1),
        lse(call.num_heads * call.total_q) {
    memset(lse.data(), -1, lse.size() * sizeof(float));
    call.out = out.data();
    call.lse = lse.data();
  }
  void write(FILE* file) const {
    fwrite(out.data(), 1, out.size(), file);
    fwrite(lse.data(), sizeof(float), lse.size(), file);
  }
};

void attend(Attention a, FILE* file) {
  const Results<Attention> results(a, a.out_dtype);
  a.out_stride_head = a.head_dim_v, a.out_stride_token = a.num_heads * a.head_dim_v;
  Plan plan;
  make_plan(a, kernels().row_limits(a), 1, plan);
  std::vector<float> partials(plan.partial_floats);
  a.partials = partials.data();

  const Kernels& isa = kernels();
  const int64_t floats = isa.workspace_floats(a, plan.few_rows, plan.few_groups, plan.tile_rows);
  float* memory = static_cast<float*>(aligned_alloc(64, (floats + 16) / 16 * 64));
  std::vector<int32_t> finished(plan.merges.size());
  for (const Task& task : plan.tasks) {
    isa.attend(a, task, memory);
    if (task.merge >= 0 && ++finished[task.merge] == plan.merges[task.merge].num_splits)
      isa.merge_splits(a, plan.merges[task.merge], memory);
  }
  free(memory);
  results.write(file);
}

void merge_states(MergeCall s, FILE* file) {
  s.parts = s.both;
  s.num_parts = 2;
  const Results<MergeStates> results(s, s.out_dtype);
  kernels().merge_states(s, 0, s.total_q);
  results.write(file);
}

void attend_backward(BackwardCall b, FILE* file) {
  const Attention& a = b.forward;
  const auto numbers = [&](int64_t count, DType dtype) {
    return std::vector<char>(count * bytes_of(dtype), -1);  // NaN
  };
  auto dq = numbers(a.total_q * a.num_heads * a.head_dim, a.q_dtype);
  auto dk = numbers(b.total_k * a.num_kv_heads * a.head_dim, a.q_dtype);
  auto dv = numbers(b.total_k * a.num_kv_heads * a.head_dim_v, a.q_dtype);
  const bool shared = b.bias_heads == 1;
  const DType bias_dtype = shared ? DType::float32 : a.bias_dtype;
  const int64_t bias_numbers = b.bias_heads * a.total_q * b.bias_keys;
  std::vector<char> dbias(bias_numbers * bytes_of(bias_dtype));
  b.dq = dq.data(), b.dk = dk.data(), b.dv = dv.data();
  b.dbias = b.bias_heads > 0 ? dbias.data() : nullptr;
  b.dbias_sums = shared ? reinterpret_cast<float*>(dbias.data()) : nullptr;
  b.dbias_stride_head = shared ? 0 : a.total_q * b.bias_keys;
  b.dbias_stride_query = b.bias_keys;

  BackwardPlan plan;
  make_backward_plan(a, 1, shared, plan);
  follow_plan(plan, b);
  const int64_t places = a.num_heads * a.total_q;
  std::vector<float> statistics(3 * places), sums(plan.sum_rows * (a.head_dim + 16));
  std::vector<float> dsinks(a.sinks ? a.num_heads : 0);
  b.lse_2 = statistics.data(), b.delta = b.lse_2 + places, b.dsink = b.delta + places;
  b.dq_sums = sums.data();
  std::vector<int32_t> turns(plan.turns), done(plan.done);
  b.turns = turns.data(), b.done = done.data();

  const Kernels& isa = kernels();
  zero_unused(b, b.total_k);
  for (int64_t i = 0; i < a.batch; ++i)
    isa.backward_statistics(b, i, 0, a.cu_seqlens_q(i + 1) - a.cu_seqlens_q(i));
  float* memory = static_cast<float*>(aligned_alloc(64, (isa.backward_floats(b) + 16) / 16 * 64));
  for (const BackwardTask& task : plan.tasks) isa.attend_backward(b, task, memory);
  free(memory);
  if (a.sinks) sum_sinks(b, dsinks.data());
  for (const auto* bytes : {&dq, &dk, &dv, &dbias})
    if (!bytes->empty()) fwrite(bytes->data(), 1, bytes->size(), file);
  if (!dsinks.empty()) fwrite(dsinks.data(), sizeof(float), dsinks.size(), file);
}

void reshape_and_cache(const ReshapeAndCache& r, const std::vector<char>& memory, FILE* file) {
  for (int64_t task = 0; task < 2 * r.residues; ++task) kernels().reshape_and_cache(r, task);
  fwrite(memory.data(), 1, memory.size(), file);
}

void run(const std::string& op, const char* fields, const char* blob, const char* out) {
  std::vector<char> memory = read_file(blob);
  FILE* file = open_file(out, "wb");
  if (op == "attend")
    attend(read_fields<Attention>(fields, memory.data()), file);
  else if (op == "attend_backward")
    attend_backward(read_fields<BackwardCall>(fields, memory.data()), file);
  else if (op == "merge_states")
    merge_states(read_fields<MergeCall>(fields, memory.data()), file);
  else if (op == "reshape_and_cache")
    reshape_and_cache(read_fields<ReshapeAndCache>(fields, memory.data()), memory, file);
  else
    throw std::runtime_error("no such operator: " + op);
  fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 5)
      run(argv[1], argv[2], argv[3], argv[4]);
    else
      puts(kernels().name);
  } catch (const std::runtime_error& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
