// One call of the kernels without torch, so that they run wherever a compiler reaches:
//
//     run_call                     prints the instruction set that the dispatch picks
//     run_call FIELDS BLOB OUT     attends, and writes the output and then the lse to OUT
//
// FIELDS holds lines "member value" for members of Attention. The value of a pointer is an offset
// into BLOB, the memory that the call works on.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/schedule.h"
#include "kernels.h"

namespace {

using namespace paged_attn;

void set(int64_t& field, const char* text, const char*) { field = strtoll(text, nullptr, 0); }
void set(uint32_t& field, const char* text, const char*) { field = strtoul(text, nullptr, 0); }
void set(bool& field, const char* text, const char*) { field = *text == '1'; }
void set(float& field, const char* text, const char*) { field = strtof(text, nullptr); }
void set(double& field, const char* text, const char*) { field = strtod(text, nullptr); }
void set(DType& field, const char* text, const char*) { field = DType(atoi(text)); }
template <class T>
void set(const T*& field, const char* text, const char* blob) {
  field = reinterpret_cast<const T*>(blob + strtoll(text, nullptr, 0));
}

void set(Attention& a, const std::string& name, const char* text, const char* blob) {
#define MEMBER(member) \
  if (name == #member) return set(a.member, text, blob);
#define STRIDED(member) MEMBER(member.data) MEMBER(member.stride0) MEMBER(member.stride1)
#define KEY_VALUE(member) \
  MEMBER(member.data)     \
  MEMBER(member.stride_page) MEMBER(member.stride_head) MEMBER(member.stride_token)
  MEMBER(q_dtype) MEMBER(kv_dtype) MEMBER(out_dtype) MEMBER(bias_dtype)
  MEMBER(batch) MEMBER(total_q) MEMBER(num_heads) MEMBER(num_kv_heads)
  MEMBER(head_dim) MEMBER(head_dim_v) MEMBER(num_groups) MEMBER(group_size)
  MEMBER(q) MEMBER(q_stride_token) MEMBER(q_stride_head)
  KEY_VALUE(k) KEY_VALUE(v) MEMBER(page_size)
  STRIDED(cu_seqlens_q) STRIDED(cu_seqlens_k) STRIDED(seqused_k) STRIDED(block_table)
  STRIDED(alibi_slopes) STRIDED(q_descale) STRIDED(k_descale) STRIDED(v_descale) STRIDED(sinks)
  MEMBER(out_scale)
  MEMBER(bias) MEMBER(bias_stride_head) MEMBER(bias_stride_query) MEMBER(bias_stride_key)
  MEMBER(softmax_scale) MEMBER(softcap) MEMBER(window_left) MEMBER(window_right)
  MEMBER(dropout.enabled) MEMBER(dropout.seed[0]) MEMBER(dropout.seed[1]) MEMBER(dropout.offset)
  MEMBER(dropout.threshold) MEMBER(dropout.keep_scale)
  MEMBER(layout.crow) MEMBER(layout.crow_batch) MEMBER(layout.crow_head) MEMBER(layout.crow_row)
  MEMBER(layout.col) MEMBER(layout.col_batch) MEMBER(layout.col_head) MEMBER(layout.col_entry)
  MEMBER(layout.num_heads) MEMBER(layout.rows) MEMBER(layout.nnz)
  MEMBER(layout.q_block_size) MEMBER(layout.k_block_size)
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

Attention read_fields(const char* path, const char* blob) {
  Attention a = {};
  FILE* file = open_file(path, "r");
  char name[64], text[64];
  while (fscanf(file, "%63s %63s", name, text) == 2) set(a, name, text, blob);
  fclose(file);
  return a;
}

void attend(const Attention& a, const Plan& plan) {
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
}

void run(const char* fields, const char* blob_path, const char* out_path) {
  const std::vector<char> blob = read_file(blob_path);
  Attention a = read_fields(fields, blob.data());
  // all bits set: NaN wherever nothing is written
  std::vector<char> out(a.total_q * a.num_heads * a.head_dim_v * bytes_of(a.out_dtype), -1);
  std::vector<float> lse(a.num_heads * a.total_q);
  a.out = out.data();
  a.lse = lse.data();
  Plan plan;
  make_plan(a, 1, plan);
  std::vector<float> partials(plan.partial_floats);
  a.partials = partials.data();
  attend(a, plan);
  FILE* file = open_file(out_path, "wb");
  fwrite(out.data(), 1, out.size(), file);
  fwrite(lse.data(), sizeof(float), lse.size(), file);
  fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 4)
      run(argv[1], argv[2], argv[3]);
    else
      puts(kernels().name);
  } catch (const std::runtime_error& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
