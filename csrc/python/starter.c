// Starts a kernel that Triton has compiled: what Triton's own launcher does with all arguments of a
// kernel, here with those alone that differ from call to call. Of the others, the parameters were
// written when the `Starter` was made.
//
// It needs no header of CUDA: the driver's two structures and five functions, which the driver may
// not change, are declared here.
#include <dlfcn.h>
#include <string.h>

#include "python.h"

typedef struct {
  int id;
  int unused;
  int value[16];
} Attribute;  // CUlaunchAttribute

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
} Config;  // CUlaunchConfig

enum { DEPENDENT = 6 };  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
enum { MOST = 192, MOST_MAPS = 8, MAP_BYTES = 128 };

static int (*launch)(const Config*, void*, void**, void**);
static int (*get_context)(void**);
static int (*set_context)(void*);
static int (*retain_context)(void**, int);
static int (*describe_error)(int, const char**);

typedef struct {
  PyObject_HEAD void* function;
  unsigned grid[3], threads, shared;
  int is_dependent, num_leaves, num_dynamic, num_parameters;
  char leaves[MOST];         // of the arguments that a call gives: the kind of each leaf
  uint64_t constants[MOST];  // the other parameters
} Starter;

static int fail(const char* text) {
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, text);
  return -1;
}

// 'c' is no parameter; 0 is a type that is not known here
static char kind_of(PyObject* type) {
  const char* name = PyUnicode_AsUTF8AndSize(type, NULL);
  if (!name) return 0;
  if (name[0] == '*') return 'p';
  if (!strcmp(name, "constexpr")) return 'c';
  if (!strcmp(name, "nvTmaDesc")) return 'm';
  if (!strcmp(name, "fp32")) return 'f';
  if (!strcmp(name, "i1") || !strcmp(name, "i8") || !strcmp(name, "i16")) return 'i';
  if (!strcmp(name, "i32") || !strcmp(name, "i64")) return 'i';
  return strcmp(name, "u64") ? 0 : 'u';
}

// the lowest bytes of `to` become the parameter: processors with GPUs are little-endian
static int put(char kind, PyObject* x, uint64_t* to) {
  if (kind == 'f') {
    float value = (float)PyFloat_AsDouble(x);
    memcpy(to, &value, sizeof value);
  } else if (kind == 'i') {
    *to = (uint64_t)PyLong_AsLongLong(x);
  } else {
    *to = x == Py_None && kind == 'p' ? 0 : PyLong_AsUnsignedLongLong(x);
  }
  return PyErr_Occurred() ? -1 : 0;
}

static int add_leaves(Starter* s, PyObject* type) {
  if (PyTuple_Check(type)) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(type); i++)
      if (add_leaves(s, PyTuple_GetItem(type, i))) return -1;
    return 0;
  }
  char kind = kind_of(type);
  if (!kind || s->num_leaves == MOST - 2) return fail("a kernel with other parameters");
  s->leaves[s->num_leaves++] = kind;
  s->num_dynamic += kind != 'c';
  return 0;
}

static int add_constants(Starter* s, PyObject* type, PyObject* value) {
  if (PyTuple_Check(type)) {
    if (!PyTuple_Check(value) || PyTuple_Size(value) != PyTuple_Size(type))
      return fail("a group of other numbers");
    for (Py_ssize_t i = 0; i < PyTuple_Size(type); i++)
      if (add_constants(s, PyTuple_GetItem(type, i), PyTuple_GetItem(value, i))) return -1;
    return 0;
  }
  char kind = kind_of(type);
  if (kind == 'c') return 0;
  if (!kind || kind == 'm' || s->num_parameters >= MOST - 2)
    return fail("a kernel with other parameters");
  return put(kind, value, &s->constants[s->num_parameters++ - s->num_dynamic]);
}

// Starter(function, grid, threads, shared, is_dependent, types, number of arguments of a call,
// values of the other arguments)
static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) {
  unsigned long long function;
  unsigned grid[3], threads, shared;
  int is_dependent;
  Py_ssize_t given;
  PyObject *types, *values;
  if (!PyArg_ParseTuple(args, "K(III)IIpO!nO!", &function, &grid[0], &grid[1], &grid[2], &threads,
                        &shared, &is_dependent, &PyTuple_Type, &types, &given, &PyTuple_Type,
                        &values))
    return NULL;
  PyObject* made = PyType_GenericNew(type, args, names);
  if (!made) return NULL;
  Starter* s = (Starter*)made;
  s->function = (void*)(uintptr_t)function;
  memcpy(s->grid, grid, sizeof grid);
  s->threads = threads, s->shared = shared, s->is_dependent = is_dependent;
  int failed = 0;
  if (PyTuple_Size(types) != given + PyTuple_Size(values)) failed = fail("arguments are missing");
  for (Py_ssize_t i = 0; i < given && !failed; i++)
    failed = add_leaves(s, PyTuple_GetItem(types, i));
  s->num_parameters = s->num_dynamic;
  for (Py_ssize_t i = 0; i < PyTuple_Size(values) && !failed; i++)
    failed = add_constants(s, PyTuple_GetItem(types, given + i), PyTuple_GetItem(values, i));
  if (!failed) return made;
  Py_DECREF(made);
  return NULL;
}

typedef struct {
  _Alignas(MAP_BYTES) unsigned char maps[MOST_MAPS][MAP_BYTES];
  uint64_t words[MOST];
  void* parameters[MOST];
  int num_leaves, num_parameters, num_maps;
} Given;

// a map is the last part of Triton's object
static int put_map(Given* g, PyObject* x) {
  static PyTypeObject* known = NULL;
  static Py_ssize_t size = 0;
  if (Py_TYPE(x) != known) {
    PyObject* found = PyObject_GetAttrString((PyObject*)Py_TYPE(x), "__basicsize__");
    size = found ? PyLong_AsSsize_t(found) : -1;
    Py_XDECREF(found);
    if (size < MAP_BYTES + (Py_ssize_t)sizeof(PyObject)) return fail("no tensor map");
    known = Py_TYPE(x);
  }
  if (g->num_maps == MOST_MAPS) return fail("too many tensor maps");
  memcpy(g->maps[g->num_maps], (char*)x + size - MAP_BYTES, MAP_BYTES);
  g->parameters[g->num_parameters++] = g->maps[g->num_maps++];
  return 0;
}

static int add_given(const Starter* s, Given* g, PyObject* x) {
  if (PyTuple_Check(x)) {
    for (Py_ssize_t i = 0, n = PyTuple_Size(x); i < n; i++)
      if (add_given(s, g, PyTuple_GetItem(x, i))) return -1;
    return 0;
  }
  if (g->num_leaves == s->num_leaves) return fail("more arguments than the kernel has");
  char kind = s->leaves[g->num_leaves++];
  if (kind == 'c') return 0;
  if (kind == 'm') return put_map(g, x);
  uint64_t* to = &g->words[g->num_parameters];
  g->parameters[g->num_parameters++] = to;
  return put(kind, x, to);
}

// As Triton does: a thread that has called nothing of CUDA's yet has the first device's context.
static int start(const Starter* s, void* stream, void** parameters) {
  void* context = NULL;
  int error = get_context(&context);
  if (!error && !context) {
    error = retain_context(&context, 0);
    if (!error) error = set_context(context);
  }
  if (error) return error;
  Attribute dependent = {DEPENDENT, 0, {1}};
  Config config = {{s->grid[0], s->grid[1], s->grid[2]},
                   {s->threads, 1, 1},
                   s->shared,
                   stream,
                   &dependent,
                   s->is_dependent != 0};
  return launch(&config, s->function, parameters, NULL);
}

// starter(stream, *arguments)
static PyObject* call(PyObject* self, PyObject* args, PyObject* names) {
  const Starter* s = (const Starter*)self;
  Py_ssize_t count = PyTuple_Size(args);
  Given g;
  g.num_leaves = g.num_parameters = g.num_maps = 0;
  void* stream = count ? (void*)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(args, 0)) : 0;
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t i = 1; i < count; i++)
    if (add_given(s, &g, PyTuple_GetItem(args, i))) return NULL;
  if (g.num_leaves != s->num_leaves) {
    fail("fewer arguments than the kernel has");
    return NULL;
  }
  int n = s->num_parameters;
  for (int i = g.num_parameters; i < n; i++)
    g.parameters[i] = (void*)&s->constants[i - s->num_dynamic];
  uint64_t no_scratch = 0;  // two pointers that every kernel of Triton has
  g.parameters[n] = g.parameters[n + 1] = &no_scratch;
  if (!s->grid[0] || !s->grid[1] || !s->grid[2]) Py_RETURN_NONE;
  int error;
  Py_BEGIN_ALLOW_THREADS error = start(s, stream, g.parameters);
  Py_END_ALLOW_THREADS if (!error) Py_RETURN_NONE;
  const char* text = NULL;
  describe_error(error, &text);
  return PyErr_Format(PyExc_RuntimeError, "the CUDA driver starts no kernel: %s (%d)",
                      text ? text : "unknown error", error);
}

static PyType_Slot slots[] = {{Py_tp_new, (void*)make},
                              {Py_tp_call, (void*)call},
                              {Py_tp_dealloc, (void*)free_object},
                              {0, NULL}};
static PyType_Spec spec = {"torch_paged_attn._launch.Starter", sizeof(Starter), 0,
                           Py_TPFLAGS_DEFAULT, slots};

// NULL where it is not there
static void* find(void* library, const char* name, int* are_missing) {
  void* found = library ? dlsym(library, name) : NULL;
  *are_missing |= !found;
  return found;
}

int add_starter(PyObject* module) {
  int are_missing = 0;
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  *(void**)&launch = find(library, "cuLaunchKernelEx", &are_missing);
  *(void**)&get_context = find(library, "cuCtxGetCurrent", &are_missing);
  *(void**)&set_context = find(library, "cuCtxSetCurrent", &are_missing);
  *(void**)&retain_context = find(library, "cuDevicePrimaryCtxRetain", &are_missing);
  *(void**)&describe_error = find(library, "cuGetErrorString", &are_missing);
  return are_missing ? 0 : add_type(module, "Starter", &spec);
}
