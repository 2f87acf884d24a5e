// The rules of the contract as conditions. Their error messages are in ops/checks.py.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../core/paged_kv.h"
#include "attention_call.h"
#include "selected_guard.h"

namespace paged_attn {
namespace {

constexpr double LARGEST_SCALE = 0x1p126;  // kernels hold it times 2 log2(e) in float32
constexpr int64_t MOST_RANKS = int64_t(1) << 15;
constexpr int64_t FAR = int64_t(1) << 40;  // wider than any window that can matter

bool is_query_type(DType d) { return d <= DType::float8_e5m2; }
bool is_float(DType d) { return d <= DType::float16; }
bool is_float8(DType d) { return d == DType::float8_e4m3fn || d == DType::float8_e5m2; }

bool is_descale(const TensorView& t, int64_t batch, int64_t heads) {
  return !t || (t.is(DType::float32) &&
                (t.dim == 0 || t.has_shape({heads}) || t.has_shape({batch, heads})));
}

// Whether it is a scale for each token of k, or of v: of their shape but for the last dimension.
// One of as many packed tokens as there are sequences is by sequence.
bool is_by_token(const TensorView& t, const TensorView& keys, int64_t batch) {
  if (!t || !t.is(DType::float32) || t.dim != keys.dim - 1) return false;
  for (int64_t i = 0; i < t.dim; ++i)
    if (t.size(i) != keys.size(i)) return false;
  return t.dim == 3 || t.size(0) != batch;
}

// Whether it has scales for each token of latents, of which a row has so many numbers.
bool is_by_column(const TensorView& t, const TensorView& latents, int64_t numbers) {
  if (!t || !t.is(DType::float32) || t.dim != latents.dim) return false;
  for (int64_t i = 0; i + 1 < t.dim; ++i)
    if (t.size(i) != latents.size(i)) return false;
  return numbers % LATENT_COLUMNS == 0 && t.last() == numbers / LATENT_COLUMNS;
}

TokenScales token_scales(const TensorView& t, bool paged) {
  const float* data = static_cast<const float*>(t.data());
  TokenScales scales = {data, 0, t.stride(1), t.stride(0)};
  if (paged) scales = {data, t.stride(0), t.stride(1), t.stride(2)};
  if (t.dim == (paged ? 4 : 3)) {
    scales.count = t.last();
    scales.stride_scale = t.stride(t.dim - 1);
  }
  return scales;
}

bool accept_shapes(const AttentionArguments& x, Attention& a) {
  const bool paged = x.block_table || x.are_slots();
  const int64_t kv_dim = paged ? 4 : 3;
  if (x.q.dim != 3 || x.k.dim != kv_dim || x.v.dim != kv_dim) return false;
  if (!is_query_type(x.q.dtype)) return false;
  const auto is_stored = [&](DType d) {
    return d == x.q.dtype || is_float8(d) || d == DType::int8 ||
           (d == DType::int4 && x.takes_token_scales);
  };
  if (x.q_latent ? !is_stored(x.v.dtype) : x.v.dtype != x.k.dtype) return false;
  if (!is_stored(x.k.dtype)) return false;
  for (int64_t i = 0; i + 1 < kv_dim; ++i)
    if (x.v.size(i) != x.k.size(i)) return false;
  a.total_q = x.q.size(0);
  a.num_heads = x.q.size(1);
  a.head_dim = x.q.size(2);
  a.num_kv_heads = x.k.size(1);
  a.head_dim_v = numbers_of(x.v);
  a.page_size = paged ? x.k.size(2) : 0;
  a.num_pages = paged ? x.k.size(0) : 0;
  a.page_shift = -1;
  if (a.page_size > 0 && (a.page_size & (a.page_size - 1)) == 0)
    for (int64_t size = a.page_size; size > 0; size >>= 1) ++a.page_shift;
  if (a.num_heads < 1 || a.num_heads > 65535 || a.head_dim < 1 || a.num_kv_heads < 1 ||
      a.head_dim_v < 1 || (paged && a.page_size < 1))
    return false;
  if (a.num_heads % a.num_kv_heads != 0 || numbers_of(x.k) != a.head_dim) return false;
  if (!x.q.rows_contiguous() || !x.k.rows_contiguous() || !x.v.rows_contiguous()) return false;

  if (x.cu_seqlens_q.dim != 1 || !x.cu_seqlens_q.is(DType::int32) || x.cu_seqlens_q.size(0) < 1)
    return false;
  a.batch = x.cu_seqlens_q.size(0) - 1;
  if (x.cu_seqlens_k &&
      !(x.cu_seqlens_k.is(DType::int32) && x.cu_seqlens_k.has_shape({a.batch + 1})))
    return false;
  if (x.q_latent && !(x.q_latent.dtype == x.q.dtype &&
                      x.q_latent.has_shape({a.total_q, a.num_heads, a.head_dim_v}) &&
                      x.q_latent.rows_contiguous()))
    return false;
  for (const TensorView* t : {&x.k_start, &x.q_position})
    if (*t && !(t->is(DType::int32) && t->has_shape({a.batch}))) return false;
  if (x.k_start && paged) return false;
  if (x.seqused_k && !(x.seqused_k.is(DType::int32) && x.seqused_k.has_shape({a.batch})))
    return false;
  if (x.block_table && (x.block_table.dim != 2 || !x.block_table.is(DType::int32) ||
                        x.block_table.size(0) != a.batch || !(x.seqused_k || x.cu_seqlens_k)))
    return false;
  return x.max_seqlen_q >= 0 && x.max_seqlen_k >= 0;
}

// Whether no two rows of a (tokens, heads, columns) tensor share memory.
bool rows_apart(const TensorView& t) {
  int64_t axes[2][2] = {{t.stride(0), t.size(0)}, {t.stride(1), t.size(1)}};
  if (axes[0][0] < axes[1][0]) std::swap(axes[0], axes[1]);
  int64_t end = t.last();
  for (int i = 1; i >= 0; --i) {  // the shorter stride first
    const int64_t stride = axes[i][0], size = axes[i][1];
    if (size <= 1) continue;
    if (stride < end) return false;
    end += stride * (size - 1);
  }
  return true;
}

// Whether the memory from the first to the last element of two tensors is not the same.
bool are_apart(const TensorView& a, const TensorView& b) {
  const char* start[2];
  int64_t bytes[2];
  for (int i = 0; i < 2; ++i) {
    const TensorView& t = i ? b : a;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim; ++d) {
      if (t.size(d) == 0) return true;
      last += (t.size(d) - 1) * t.stride(d);
    }
    start[i] = static_cast<const char*>(t.data());
    bytes[i] = (last + 1) * bytes_of(t.dtype);
  }
  return start[0] + bytes[0] <= start[1] || start[1] + bytes[1] <= start[0];
}

bool accept_out(const AttentionArguments& x, const Attention& a) {
  const TensorView& out = x.out;
  if (out.dtype != x.q.dtype && !is_float8(out.dtype)) return false;
  if (!out.has_shape({a.total_q, a.num_heads, a.head_dim_v}) || !out.rows_contiguous())
    return false;
  if (a.total_q > 0 && !rows_apart(out)) return false;
  for (const TensorView* t :
       {&x.q, &x.k, &x.v, &x.cu_seqlens_q, &x.cu_seqlens_k, &x.seqused_k, &x.block_table,
        &x.attn_bias, &x.alibi_slopes, &x.sinks, &x.q_descale, &x.k_descale, &x.v_descale,
        &x.out_scale, &x.rng_state, &x.q_latent, &x.tail_mask, &x.k_start, &x.q_position})
    if (*t && !are_apart(out, *t)) return false;
  return true;
}

bool accept_options(const AttentionArguments& x, Attention& a) {
  if (x.attn_bias) {
    const TensorView& bias = x.attn_bias;
    if (bias.dim != 3 || !(is_float(bias.dtype) || bias.is(DType::boolean))) return false;
    if (bias.size(0) != 1 && bias.size(0) != a.num_heads) return false;
    if (bias.size(1) != a.total_q) return false;
  }
  if (x.tail_mask &&
      (x.tail_mask.dim != 2 || !x.tail_mask.is(DType::boolean) || x.tail_mask.size(0) != a.total_q))
    return false;
  if (x.alibi_slopes &&
      !(x.alibi_slopes.is(DType::float32) && (x.alibi_slopes.has_shape({a.num_heads}) ||
                                              x.alibi_slopes.has_shape({a.batch, a.num_heads}))))
    return false;
  if (x.sinks && !(x.sinks.is(DType::float32) && x.sinks.has_shape({a.num_heads}))) return false;
  const auto is_key_scale = [&](const TensorView& t) {
    return is_descale(t, a.batch, a.num_kv_heads) ||
           (x.takes_token_scales && is_by_token(t, x.k, a.batch));
  };
  const bool by_column = x.q_latent && is_by_column(x.v_descale, x.v, a.head_dim_v);
  if (!is_descale(x.q_descale, a.batch, a.num_kv_heads) || !is_key_scale(x.k_descale) ||
      !(is_key_scale(x.v_descale) || by_column))
    return false;
  a.q_dtype = x.q.dtype;
  a.kv_dtype = x.k.dtype;
  a.v_dtype = x.v.dtype;
  a.out_dtype = x.has_out ? x.out.dtype : x.out_dtype.value_or(x.q.dtype);
  if (!is_query_type(a.out_dtype)) return false;
  if (x.out_scale && !(x.out_scale.is(DType::float32) && is_float8(a.out_dtype) &&
                       (x.out_scale.dim == 0 || x.out_scale.has_shape({1}))))
    return false;
  const double scale = std::abs(x.softmax_scale.value_or(1));
  if (!(scale <= LARGEST_SCALE)) return false;
  if (x.softcap != 0 && !(x.softcap >= 1 / LARGEST_SCALE && x.softcap <= LARGEST_SCALE &&
                          scale <= x.softcap * LARGEST_SCALE))
    return false;
  if (x.window_size_left < -1 || x.window_size_right < -1) return false;
  if (!(x.dropout_p >= 0 && x.dropout_p < 1)) return false;
  if (x.dropout_p > 0 && !x.rng_state) return false;
  if (x.rng_state &&
      !(x.rng_state.is(DType::int64) && (x.rng_state.has_shape({2}) || x.rng_state.has_shape({5}))))
    return false;
  // NotImplementedError: backends/cpu/__init__.py names what there is no kernel for
  return x.key_ranks >= 1 && x.key_ranks <= MOST_RANKS && x.key_rank >= 0 &&
         x.key_rank < x.key_ranks && x.key_interleave >= 1 && x.key_interleave <= INT32_MAX;
}

bool is_block_size(int64_t size) { return size >= 16 && size <= 256 && (size & (size - 1)) == 0; }

bool accept_layout(const AttentionArguments& x, Attention& a) {
  const TensorView &crow = x.crow_indices, &col = x.col_indices;
  if (!is_block_size(x.q_block_size) || !is_block_size(x.k_block_size)) return false;
  if (!crow.is(DType::int32) || !col.is(DType::int32)) return false;
  if ((crow.dim != 2 && crow.dim != 3) || col.dim != crow.dim) return false;
  for (int64_t i = 0; i + 1 < crow.dim; ++i)
    if (crow.size(i) != col.size(i)) return false;
  if (crow.last() < 1 || (crow.dim == 3 && crow.size(0) != a.batch)) return false;
  const int64_t head = crow.dim - 2, entry = crow.dim - 1, heads = crow.size(head);
  if (heads != 1 && heads != a.num_kv_heads && heads != a.num_heads) return false;
  BlockLayout& l = a.layout;
  l.crow = static_cast<const int32_t*>(crow.data());
  l.col = static_cast<const int32_t*>(col.data());
  l.crow_batch = crow.dim == 3 ? crow.stride(0) : 0;
  l.col_batch = crow.dim == 3 ? col.stride(0) : 0;
  l.crow_head = crow.stride(head);
  l.crow_row = crow.stride(entry);
  l.col_head = col.stride(head);
  l.col_entry = col.stride(entry);
  l.num_heads = heads;
  l.rows = crow.last() - 1;
  l.nnz = col.last();
  l.q_block_size = x.q_block_size;
  l.k_block_size = x.k_block_size;
  return true;
}

// The environment is read once.
bool invariant_by_default() {
  static const bool is_set = [] {
    const char* value = std::getenv("PAGED_ATTN_BATCH_INVARIANT");
    return value && std::strcmp(value, "1") == 0;
  }();
  return is_set;
}

// Lengths decide which memory is read. What is checked and what is used is this copy of them, so
// that another thread that writes the tensors meanwhile changes nothing.
void copy_lengths(const AttentionArguments& x, Attention& a) {
  static thread_local std::vector<int32_t> lengths;
  lengths.resize(5 * (a.batch + 1));
  int32_t* to = lengths.data();
  const auto copy = [&](const TensorView& t) {
    Strided<int32_t> copied;
    if (!t) return copied;
    const Strided<int32_t> from = strided<int32_t>(t);
    for (int64_t i = 0; i < t.size(0); ++i) to[i] = read_once(from.at(i));
    copied.data = to;
    copied.stride0 = 1;
    to += t.size(0);
    return copied;
  };
  a.cu_seqlens_q = copy(x.cu_seqlens_q);
  a.cu_seqlens_k = copy(x.cu_seqlens_k);
  a.seqused_k = copy(x.seqused_k);
  a.k_start = copy(x.k_start);
  a.q_position = copy(x.q_position);
}

void fill_in(const AttentionArguments& x, Attention& a) {
  const auto key_value = [](const TensorView& t) {
    if (t.dim == 3) return KeyValue{t.data(), 0, t.stride(1), t.stride(0)};
    return KeyValue{t.data(), t.stride(0), t.stride(1), t.stride(2)};
  };
  a.q = x.q.data();
  a.q_stride_token = x.q.stride(0);
  a.q_stride_head = x.q.stride(1);
  if (x.q_latent) {
    a.latent = x.q_latent.data();
    a.latent_stride_token = x.q_latent.stride(0);
    a.latent_stride_head = x.q_latent.stride(1);
  }
  a.k = key_value(x.k);
  a.v = key_value(x.v);
  copy_lengths(x, a);
  a.block_table = strided<int32_t>(x.block_table);
  a.alibi_slopes = per_head(x.alibi_slopes);
  a.q_descale = per_head(x.q_descale);
  const auto take_scales = [&](const TensorView& t, Strided<float>& by_head,
                               TokenScales& by_token) {
    if (is_by_token(t, x.k, a.batch) || (t && t.dim == x.k.dim))
      by_token = token_scales(t, a.page_size > 0);
    else
      by_head = per_head(t);
  };
  take_scales(x.k_descale, a.k_descale, a.k_scales);
  take_scales(x.v_descale, a.v_descale, a.v_scales);
  a.sinks = strided<float>(x.sinks);
  a.out_scale = static_cast<const float*>(x.out_scale.data());
  a.bias = x.attn_bias.data();
  if (x.attn_bias) {
    a.bias_dtype = x.attn_bias.dtype;
    a.bias_stride_head = x.attn_bias.size(0) == 1 ? 0 : x.attn_bias.stride(0);
    a.bias_stride_query = x.attn_bias.stride(1);
    a.bias_stride_key = x.attn_bias.stride(2);
  }
  a.tail = static_cast<const bool*>(x.tail_mask.data());
  if (x.tail_mask) {
    a.tail_stride_query = x.tail_mask.stride(0);
    a.tail_stride_key = x.tail_mask.stride(1);
  }
  if (x.key_ranks > 1) {
    a.key_run = x.key_interleave;
    a.key_span = x.key_interleave * x.key_ranks;
    a.key_offset = x.key_interleave * x.key_rank;
  }
  a.batch_invariant = x.batch_invariant || invariant_by_default();
  a.softmax_scale = x.softmax_scale.value_or(1 / std::sqrt(double(a.head_dim)));
  a.softcap = float(x.softcap);
  a.window_left = x.window_size_left < FAR ? x.window_size_left : -1;
  a.window_right = x.window_size_right < FAR ? x.window_size_right : -1;
  if (x.causal) a.window_right = 0;
  if (x.dropout_p > 0) {
    const Strided<int64_t> rng = strided<int64_t>(x.rng_state);
    const uint64_t seed = uint64_t(rng(0));
    const bool has_base = x.rng_state.size(0) == 5;
    a.dropout = {true,
                 {uint32_t(seed), uint32_t(seed >> 32)},
                 uint32_t(rng(1)),
                 uint32_t(std::floor(x.dropout_p * 4294967296.0)),
                 float(1 / (1 - x.dropout_p)),
                 has_base ? rng(2) : 0,
                 has_base ? rng(3) : 0,
                 has_base ? rng(4) : 0};
  }
  // query heads with layout rows of their own see other keys: each is a group of its own
  const bool apart = a.layout.crow && a.layout.num_heads > a.num_kv_heads;
  a.num_groups = apart ? a.num_heads : a.num_kv_heads;
  a.group_size = a.num_heads / a.num_groups;
}

bool nondecreasing_from_zero(const Strided<int32_t>& bounds, int64_t batch) {
  if (bounds(0) != 0) return false;
  for (int64_t b = 0; b < batch; ++b)
    if (bounds(b + 1) < bounds(b)) return false;
  return true;
}

// Columns may come in any order, but are most often sorted.
bool are_columns(const int32_t* columns, int64_t stride, int64_t count) {
  bool sorted = true, negative = false;
  for (int64_t i = 0; i < count; ++i) {
    negative |= columns[i * stride] < 0;
    sorted &= i == 0 || columns[i * stride] > columns[(i - 1) * stride];
  }
  if (sorted || negative) return !negative;
  std::vector<int32_t> copy(count);
  for (int64_t i = 0; i < count; ++i) copy[i] = columns[i * stride];
  std::sort(copy.begin(), copy.end());
  return std::adjacent_find(copy.begin(), copy.end()) == copy.end();
}

bool accept_layout_rows(const Attention& a, const Sequence& s) {
  const BlockLayout& l = a.layout;
  const int64_t first = max64(s.past, 0), last = s.past + s.q_len - 1;
  if (s.q_len == 0 || s.k_len == 0 || last < first) return true;
  if (last / l.q_block_size >= l.rows) return false;
  for (int64_t head = 0; head < l.num_heads; ++head)
    for (int64_t row = first / l.q_block_size; row <= last / l.q_block_size; ++row) {
      const int32_t* crow = l.crow + s.index * l.crow_batch + head * l.crow_head + row * l.crow_row;
      const int64_t begin = read_once(crow), end = read_once(crow + l.crow_row);
      if (begin < 0 || end < begin || end > l.nnz) return false;
      int64_t count;
      const int32_t* columns = layout_row(l, s.index, head, row, &count);
      if (!are_columns(columns, l.col_entry, count)) return false;
    }
  return true;
}

bool accept_values(const AttentionArguments& x, const Attention& a) {
  const bool paged = a.page_size > 0;
  const Dropout& drop = a.dropout;
  if (drop.first_head < 0 || drop.first_head > 65535 - a.num_heads || drop.first_row < 0 ||
      drop.first_row > INT32_MAX || drop.first_column < 0 || drop.first_column > INT32_MAX)
    return false;
  if (!nondecreasing_from_zero(a.cu_seqlens_q, a.batch) || a.cu_seqlens_q(a.batch) > a.total_q)
    return false;
  if (a.cu_seqlens_k && !nondecreasing_from_zero(a.cu_seqlens_k, a.batch)) return false;
  // else the bounds of keys say how many there are, but not where
  const bool has_bounds = !paged && !x.k_start;
  if (has_bounds && (a.cu_seqlens_k ? a.cu_seqlens_k : a.cu_seqlens_q)(a.batch) > x.k.size(0))
    return false;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_at(a, b);
    if (s.k_len < 0) return false;
    if (x.k_start && (s.k_start < 0 || s.k_start > x.k.size(0) - s.k_len)) return false;
    if (x.tail_mask && s.k_len > 0 && s.q_len > x.tail_mask.size(1)) return false;
    if (has_bounds && a.seqused_k) {
      const Strided<int32_t>& bounds = a.cu_seqlens_k ? a.cu_seqlens_k : a.cu_seqlens_q;
      if (s.k_len > int64_t(bounds(b + 1)) - bounds(b)) return false;
    }
    if (x.attn_bias && s.q_len > 0 && s.k_len > x.attn_bias.size(2)) return false;
    if (paged && !a.selection.enabled) {
      const int64_t pages = s.k_len / a.page_size + (s.k_len % a.page_size != 0);
      if (pages > x.block_table.size(1)) return false;
      const KeyRange keys = s.q_len ? visible_keys(a, s, 0, s.q_len - 1) : KeyRange{0, 0};
      const int64_t num_pages = x.k.size(0);
      for (int64_t i = keys.begin / a.page_size; i * a.page_size < keys.end; ++i) {
        const int32_t page = a.block_table(b, i);
        if (page < 0 || page >= num_pages) return false;
      }
    }
    if (a.layout.crow && !accept_layout_rows(a, s)) return false;
  }
  return !a.selection.enabled || accept_list_values(x, a);
}

}  // namespace

bool accept_attention(const AttentionArguments& x, Attention& a) {
  if (!accept_shapes(x, a) || !accept_options(x, a)) return false;
  if (x.has_out && !accept_out(x, a)) return false;
  if (x.crow_indices && !accept_layout(x, a)) return false;
  fill_in(x, a);
  if (x.has_lists && !accept_lists(x, a)) return false;
  return accept_values(x, a);
}

}  // namespace paged_attn
