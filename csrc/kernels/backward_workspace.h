// Scratch of a task of the backward.
#pragma once

#include "../core/product.h"
#include "../core/workspace.h"
#include "backward_rows.h"

namespace {

// Rows after a run that its last register tile, or its transposition, may touch.
constexpr int ROWS_AFTER = 32;
// The room for a query tile is a multiple of this, which is one of register tiles and of steps
// along rows.
constexpr int ROWS_TOGETHER = 96;

struct BackwardWorkspace : Workspace {
  using Workspace::Workspace;

  int64_t rows;                        // that a query tile may have
  int64_t depth_q, depth_o;            // operands along head_dim, head_dim_v
  int64_t stride_q, stride_o;          // the same in whole vectors
  int64_t stride_dk, stride_dv;        // of sums
  int64_t stride_t;                    // of operands along rows
  float *keys, *values, *keys_across;  // right-hand sides of S, dP, dQ
  float *dk, *dv;
  float *q, *o, *q_across, *o_across;  // left-hand sides of S, dP; right-hand sides of dK, dV
  float *scores, *gradients;           // (rows, KEY_TILE)
  float *scores_t, *gradients_t;       // operands, (KEY_TILE, rows)
  float *lse_2, *delta;
  int64_t *q_offset, *o_offset;
};

template <class Product>
PAGED_ATTN_INLINE BackwardWorkspace backward_workspace(const Backward& b, int64_t rows,
                                                       float* memory) {
  constexpr int DEPTH = Product::DEPTH, PANEL = Product::PANEL;
  const Attention& a = b.forward;
  BackwardWorkspace w(memory);
  w.rows = round_up(rows, ROWS_TOGETHER);
  const auto depth = [](int64_t dim) __attribute__((always_inline)) {
    return round_up(dim, DEPTH * Product::GRAIN) / DEPTH;
  };
  w.depth_q = depth(a.head_dim);
  w.depth_o = depth(a.head_dim_v);
  w.stride_q = round_up(w.depth_q, W);
  w.stride_o = round_up(w.depth_o, W);
  w.stride_dk = round_up(a.head_dim, W);
  w.stride_dv = round_up(a.head_dim_v, W);
  w.stride_t = w.rows / DEPTH;
  w.keys = w.take(w.stride_q * KEY_TILE);
  w.values = w.take(w.stride_o * KEY_TILE);
  w.keys_across = w.take(round_up(a.head_dim, PANEL) * KEY_TILE / DEPTH);
  w.dk = w.take(w.stride_dk * (KEY_TILE + ROWS_AFTER));
  w.dv = w.take(w.stride_dv * (KEY_TILE + ROWS_AFTER));
  w.q = w.take(w.rows * w.stride_q);
  w.o = w.take(w.rows * w.stride_o);
  w.q_across = w.take(round_up(a.head_dim, PANEL) * w.rows / DEPTH);
  w.o_across = w.take(round_up(a.head_dim_v, PANEL) * w.rows / DEPTH);
  w.scores = w.take(w.rows * KEY_TILE);
  w.gradients = w.take(w.rows * KEY_TILE);
  w.scores_t = w.take((KEY_TILE + ROWS_AFTER) * w.stride_t);
  w.gradients_t = w.take((KEY_TILE + ROWS_AFTER) * w.stride_t);
  w.lse_2 = w.take(w.rows);
  w.delta = w.take(w.rows);
  w.q_offset = (int64_t*)w.take(2 * w.rows);
  w.o_offset = (int64_t*)w.take(2 * w.rows);
  return w;
}

}  // namespace
