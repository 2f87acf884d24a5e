// A call of an operator that is like one of its last: its arguments in the form in which the
// operator's kernel gets them, the plan that a guard finds for them, and the plan's results.
#include <string.h>

#include "python.h"

enum { MOST = 64 };

typedef struct {
  PyObject_HEAD PyObject* arguments;  // name -> its place, or (default, types of its values)
  PyObject* plans;                    // key -> tuple of (guard, plan), the latest first
  PyObject* key;      // the key, or a function that returns a tuple which begins with it
  PyObject* hints;    // names of the numbers that are the function's arguments
  PyObject* beside;   // a tensor's name: the function also gets whether it is given; or None
  PyObject* written;  // places of the tensors that a call changes
  PyObject *forward_ad, *is_profiling, *function_modes, *is_grad_enabled, *is_inference, *increment;
  Py_ssize_t required;
} Repeated;

// a call's arguments: those by place, and those by name whose values are not the defaults
typedef struct {
  PyObject* places[MOST];
  Py_ssize_t count;
  PyObject* named;
} Call;

// Repeated(arguments, required, plans, key, hints, beside, written, of_torch): of torch, the module
// forward_ad and the functions `_profiler_enabled`, `_len_torch_function_stack`, `is_grad_enabled`,
// `Tensor.is_inference` and `_increment_version`
static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) {
  Repeated r;
  memset(&r, 0, sizeof r);
  if (!PyArg_ParseTuple(args, "O!nO!OO!OO!(OOOOOO)", &PyDict_Type, &r.arguments, &r.required,
                        &PyDict_Type, &r.plans, &r.key, &PyTuple_Type, &r.hints, &r.beside,
                        &PyTuple_Type, &r.written, &r.forward_ad, &r.is_profiling,
                        &r.function_modes, &r.is_grad_enabled, &r.is_inference, &r.increment))
    return NULL;
  Repeated* made = (Repeated*)PyType_GenericNew(type, args, names);
  if (!made) return NULL;
  memcpy((char*)made + sizeof(PyObject), (char*)&r + sizeof(PyObject), sizeof r - sizeof(PyObject));
  for (PyObject** x = &made->arguments; x <= &made->increment; x++) Py_INCREF(*x);
  return (PyObject*)made;
}

// what a function without arguments returns, as a number; -1 with an exception
static long number_from(PyObject* function) {
  PyObject* found = PyObject_CallNoArgs(function);
  long number = found ? PyLong_AsLong(found) : -1;
  Py_XDECREF(found);
  return number;
}

// Whether something stands between a call and the operator's kernel that tensors do not show:
// forward-mode AD, a profiler, a function mode. 1, 0, or -1 with an exception
static int is_watched(const Repeated* r) {
  PyObject* level = PyObject_GetAttrString(r->forward_ad, "_current_level");
  if (!level) return -1;
  int is_on = PyLong_AsLong(level) >= 0;
  Py_DECREF(level);
  for (int i = 0; i < 2 && !is_on; i++) {
    long number = number_from(i ? r->function_modes : r->is_profiling);
    if (number < 0) return -1;
    is_on = number != 0;
  }
  return PyErr_Occurred() ? -1 : is_on;
}

static int take_named(Call* c, PyObject* name, PyObject* value, PyObject* expected) {
  PyObject *ordinary = PyTuple_GetItem(expected, 0), *types = PyTuple_GetItem(expected, 1);
  if (value == ordinary) return 1;
  int is_known = 0;
  for (Py_ssize_t i = 0, n = PyTuple_Size(types); i < n; i++)
    is_known |= (PyObject*)Py_TYPE(value) == PyTuple_GetItem(types, i);
  if (!is_known) return 0;
  int is_ordinary = PyObject_RichCompareBool(value, ordinary, Py_EQ);
  if (is_ordinary) return is_ordinary;
  if (!c->named && !(c->named = PyDict_New())) return -1;
  return PyDict_SetItem(c->named, name, value) ? -1 : 1;
}

// The arguments as a kernel gets them, which gets no defaults: neither by name nor behind the last
// argument that is given. 1, 0 if the dispatcher is to convert or refuse them, -1
static int take(const Repeated* r, Call* c, PyObject* args, PyObject* options) {
  Py_ssize_t by_place = PyTuple_Size(args), at = 0;
  if (by_place > MOST) return 0;
  for (c->count = 0; c->count < by_place; c->count++)
    c->places[c->count] = PyTuple_GetItem(args, c->count);
  PyObject *name, *value;
  while (PyDict_Next(options, &at, &name, &value)) {
    PyObject* expected = PyDict_GetItemWithError(r->arguments, name);
    if (!expected && (PyErr_Occurred() || value != Py_None)) return PyErr_Occurred() ? -1 : 0;
    if (!expected) continue;
    if (PyTuple_Check(expected)) {
      int is_taken = take_named(c, name, value, expected);
      if (is_taken != 1) return is_taken;
    } else if (value != Py_None) {
      Py_ssize_t place = PyLong_AsSsize_t(expected);
      if (place < by_place || place >= MOST) return 0;
      while (c->count <= place) c->places[c->count++] = Py_None;
      c->places[place] = value;
    }
  }
  while (c->count > r->required && c->places[c->count - 1] == Py_None) c->count--;
  return 1;
}

// the hint's value as a new reference, taken from the call's arguments; NULL if it is no number
static PyObject* take_hint(const Repeated* r, Call* c, PyObject* name) {
  PyObject* expected = PyDict_GetItemWithError(r->arguments, name);
  PyObject* value = NULL;
  if (!expected) return NULL;
  if (PyTuple_Check(expected)) {
    value = c->named ? PyDict_GetItemWithError(c->named, name) : NULL;
    Py_XINCREF(value);
    if (value && PyDict_DelItem(c->named, name)) Py_CLEAR(value);
    if (!value && !PyErr_Occurred()) value = Py_NewRef(PyTuple_GetItem(expected, 0));
  } else {
    // an earlier hint has moved what is behind it
    Py_ssize_t place = PyLong_AsSsize_t(expected), by = 0;
    for (; by < c->count && PyTuple_GetItem(r->hints, by) != name; by++) place--;
    if (place < 0 || place >= c->count) return NULL;
    value = Py_NewRef(c->places[place]);
    c->count--;
    memmove(&c->places[place], &c->places[place + 1], (c->count - place) * sizeof(PyObject*));
  }
  if (value && (!PyLong_CheckExact(value) || PyLong_AsLongLong(value) < 0)) Py_CLEAR(value);
  return value;
}

// whether the tensor `beside` is given
static int is_given(const Repeated* r, const Call* c) {
  PyObject* place = PyDict_GetItemWithError(r->arguments, r->beside);
  Py_ssize_t at = place ? PyLong_AsSsize_t(place) : MOST;
  return at < c->count && c->places[at] != Py_None;
}

// The key of the operator's plans for the call, a new reference; hints leave its arguments. NULL
// without an exception if a hint is no number
static PyObject* find_key(const Repeated* r, Call* c) {
  Py_ssize_t number = PyTuple_Size(r->hints), more = r->beside != Py_None;
  if (!number) return Py_NewRef(r->key);
  PyObject* asked = PyTuple_New(number + more);
  if (!asked) return NULL;
  if (more) PyTuple_SetItem(asked, number, PyBool_FromLong(is_given(r, c)));
  for (Py_ssize_t i = 0; i < number; i++) {
    PyObject* value = take_hint(r, c, PyTuple_GetItem(r->hints, i));
    if (!value) {
      Py_DECREF(asked);
      return NULL;
    }
    PyTuple_SetItem(asked, i, value);
  }
  PyObject* found = PyObject_Call(r->key, asked, NULL);
  Py_DECREF(asked);
  PyObject* key = found ? PyTuple_GetItem(found, 0) : NULL;
  Py_XINCREF(key);
  Py_XDECREF(found);
  return key;
}

// Whether nothing but the kernel would see a call that is like the guard's
static int is_unseen(const Repeated* r, const Guard* guard) {
  if (!guard->is_plain) return 0;
  if (!guard->requires_grad) return 1;
  long is_recorded = number_from(r->is_grad_enabled);
  return is_recorded < 0 ? -1 : !is_recorded;
}

// the results of the first plan whose guard matches; NULL without an exception if none does
static PyObject* run(const Repeated* r, const Call* c, PyObject* recent) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(recent); i < n; i++) {
    PyObject *both = PyTuple_GetItem(recent, i), *given, *addresses;
    const Guard* guard = (const Guard*)PyTuple_GetItem(both, 0);
    int is_like = is_unseen(r, guard);
    if (is_like == 1)
      is_like = guard_match(guard, c->places, c->count, c->named, &given, &addresses);
    if (is_like < 0) return NULL;
    if (!is_like) continue;
    PyObject* plan = PyTuple_GetItem(both, 1);
    PyObject* results = PyObject_CallFunctionObjArgs(plan, given, addresses, NULL);
    Py_DECREF(given);
    Py_DECREF(addresses);
    return results;
  }
  return NULL;
}

// Tell autograd which tensors have changed; those of inference mode have no version.
static int bump(const Repeated* r, const Call* c) {
  Py_ssize_t number = PyTuple_Size(r->written);
  if (!number) return 0;
  PyObject* changed = PyList_New(0);
  int failed = !changed;
  for (Py_ssize_t i = 0; i < number && !failed; i++) {
    PyObject* x = c->places[PyLong_AsSsize_t(PyTuple_GetItem(r->written, i))];
    PyObject* has_none = PyObject_CallFunctionObjArgs(r->is_inference, x, NULL);
    failed = !has_none || (has_none == Py_False && PyList_Append(changed, x));
    Py_XDECREF(has_none);
  }
  if (!failed && PyList_Size(changed)) {
    PyObject* done = PyObject_CallFunctionObjArgs(r->increment, changed, NULL);
    failed = !done;
    Py_XDECREF(done);
  }
  Py_XDECREF(changed);
  return failed ? -1 : 0;
}

static PyObject* try_call(const Repeated* r, Call* c, PyObject* args, PyObject* options) {
  int is_ours = is_watched(r);
  if (is_ours) return NULL;
  if (take(r, c, args, options) != 1) return NULL;
  PyObject* key = find_key(r, c);
  PyObject* recent = key ? PyDict_GetItemWithError(r->plans, key) : NULL;
  Py_XDECREF(key);
  if (!recent) return NULL;
  Py_INCREF(recent);  // another thread may replace it
  PyObject* results = run(r, c, recent);
  Py_DECREF(recent);
  if (results && bump(r, c)) Py_CLEAR(results);
  return results;
}

// repeated(args, options): the results of a call like one of the last, or NotImplemented
static PyObject* call(PyObject* self, PyObject* given, PyObject* names) {
  PyObject *args, *options;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &args, &PyDict_Type, &options)) return NULL;
  Call c;
  c.count = 0, c.named = NULL;
  PyObject* results = try_call((const Repeated*)self, &c, args, options);
  Py_XDECREF(c.named);
  return results || PyErr_Occurred() ? results : Py_NewRef(Py_NotImplemented);
}

static void drop(PyObject* self) {
  Repeated* r = (Repeated*)self;
  for (PyObject** x = &r->arguments; x <= &r->increment; x++) Py_XDECREF(*x);
  free_object(self);
}

static PyType_Slot slots[] = {
    {Py_tp_new, (void*)make}, {Py_tp_call, (void*)call}, {Py_tp_dealloc, (void*)drop}, {0, NULL}};
static PyType_Spec spec = {"torch_paged_attn._launch.Repeated", sizeof(Repeated), 0,
                           Py_TPFLAGS_DEFAULT, slots};

int add_repeated(PyObject* module) { return add_type(module, "Repeated", &spec); }
