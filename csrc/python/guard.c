// Whether a call has the options of an earlier one, and tensors that differ in values and addresses
// alone. What tensors are is compared by torch's own check (torch._dynamo's TensorGuards): type,
// dispatch keys in this thread's modes, dtype, device, whether it requires grad, sizes and strides.
#include <string.h>

#include "python.h"

enum { MOST = 64, ALIGNMENT = 16 };

// Guard(check of the given tensors, address_of, tuple of booleans: which tensors are given,
// options, surroundings, current_device or None, device, is_plain, requires_grad)
//
// surroundings: tuples (dictionary, name, value) of what has to be the same object
static PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) {
  PyObject *check, *address_of, *given, *options, *surroundings, *current_device;
  int device, is_plain, requires_grad;
  if (!PyArg_ParseTuple(args, "OOO!O!O!Oipp", &check, &address_of, &PyTuple_Type, &given,
                        &PyDict_Type, &options, &PyTuple_Type, &surroundings, &current_device,
                        &device, &is_plain, &requires_grad))
    return NULL;
  Py_ssize_t count = PyTuple_Size(given);
  if (count > MOST) {
    PyErr_SetString(PyExc_ValueError, "more tensors than a guard compares");
    return NULL;
  }
  Guard* g = (Guard*)PyType_GenericNew(type, args, names);
  if (!g) return NULL;
  g->check = Py_NewRef(check), g->address_of = Py_NewRef(address_of);
  g->options = Py_NewRef(options), g->surroundings = Py_NewRef(surroundings);
  g->current_device = Py_NewRef(current_device);
  g->count = count, g->device = device;
  g->is_plain = is_plain, g->requires_grad = requires_grad;
  for (Py_ssize_t i = 0; i < count; i++)
    if (PyObject_IsTrue(PyTuple_GetItem(given, i)) == 1) g->given |= (uint64_t)1 << i;
  return (PyObject*)g;
}

static int has_options(const Guard* g, PyObject* options) {
  if (!options) return PyDict_Size(g->options) == 0;
  return PyObject_RichCompareBool(g->options, options, Py_EQ);
}

static int is_surrounded(const Guard* g) {
  for (Py_ssize_t i = 0, n = PyTuple_Size(g->surroundings); i < n; i++) {
    PyObject* x = PyTuple_GetItem(g->surroundings, i);
    PyObject* found = PyDict_GetItemWithError(PyTuple_GetItem(x, 0), PyTuple_GetItem(x, 1));
    if (found != PyTuple_GetItem(x, 2)) return PyErr_Occurred() ? -1 : 0;
  }
  return 1;
}

static int is_on_device(const Guard* g) {
  if (g->device < 0) return 1;
  PyObject* found = PyObject_CallNoArgs(g->current_device);
  if (!found) return -1;
  long device = PyLong_AsLong(found);
  Py_DECREF(found);
  return PyErr_Occurred() ? -1 : device == g->device;
}

static int is_checked(const Guard* g, PyObject* given) {
  PyObject* said = PyObject_Call(g->check, given, NULL);
  if (!said) return -1;
  int is_same = said == Py_True;
  Py_DECREF(said);
  return is_same;
}

// 1 if all addresses are multiples of ALIGNMENT
static int find_addresses(const Guard* g, PyObject* given, PyObject* addresses) {
  unsigned long long bits = 0;
  for (Py_ssize_t i = 0, n = PyTuple_Size(given); i < n; i++) {
    PyObject* at = PyObject_CallFunctionObjArgs(g->address_of, PyTuple_GetItem(given, i), NULL);
    if (!at) return -1;
    bits |= PyLong_AsUnsignedLongLong(at);
    if (PyList_SetItem(addresses, i, at) || PyErr_Occurred()) return -1;
  }
  return bits % ALIGNMENT == 0;
}

int guard_match(const Guard* g, PyObject* const* tensors, Py_ssize_t count, PyObject* options,
                PyObject** given, PyObject** addresses) {
  *given = *addresses = NULL;
  if (count != g->count) return 0;
  Py_ssize_t number = 0;
  for (Py_ssize_t i = 0; i < count; i++) {
    if ((tensors[i] != Py_None) != (int)(g->given >> i & 1)) return 0;
    number += tensors[i] != Py_None;
  }
  int is_like = has_options(g, options);
  if (is_like == 1) is_like = is_surrounded(g);
  if (is_like == 1) is_like = is_on_device(g);
  if (is_like != 1) return is_like;
  *given = PyTuple_New(number);
  *addresses = PyList_New(number);
  is_like = *given && *addresses ? 1 : -1;
  for (Py_ssize_t i = 0, to = 0; i < count && is_like == 1; i++)
    if (tensors[i] != Py_None && PyTuple_SetItem(*given, to++, Py_NewRef(tensors[i]))) is_like = -1;
  if (is_like == 1) is_like = is_checked(g, *given);
  if (is_like == 1) is_like = find_addresses(g, *given, *addresses);
  if (is_like != 1) {
    Py_CLEAR(*given);
    Py_CLEAR(*addresses);
  }
  return is_like;
}

// match(tensors, options): (given tensors, their addresses) if the call is like the guard's, or
// None
static PyObject* match(PyObject* self, PyObject* args) {
  PyObject *tensors, *options, *given, *addresses, *listed[MOST];
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyDict_Type, &options)) return NULL;
  Py_ssize_t count = PyTuple_Size(tensors);
  if (count > MOST) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < count; i++) listed[i] = PyTuple_GetItem(tensors, i);
  int is_like = guard_match((Guard*)self, listed, count, options, &given, &addresses);
  if (is_like < 0) return NULL;
  if (!is_like) Py_RETURN_NONE;
  PyObject* both = PyTuple_Pack(2, given, addresses);
  Py_DECREF(given);
  Py_DECREF(addresses);
  return both;
}

// checking(check): the same guard with another check
static PyObject* checking(PyObject* self, PyObject* check) {
  Guard* made = (Guard*)PyType_GenericNew(Py_TYPE(self), NULL, NULL);
  if (!made) return NULL;
  const Guard* g = (const Guard*)self;
  memcpy((char*)made + sizeof(PyObject), (const char*)g + sizeof(PyObject),
         sizeof *g - sizeof(PyObject));
  made->check = check;
  Py_INCREF(check);
  Py_INCREF(g->address_of);
  Py_INCREF(g->options);
  Py_INCREF(g->surroundings);
  Py_INCREF(g->current_device);
  return (PyObject*)made;
}

static void drop(PyObject* self) {
  Guard* g = (Guard*)self;
  Py_XDECREF(g->check);
  Py_XDECREF(g->address_of);
  Py_XDECREF(g->options);
  Py_XDECREF(g->surroundings);
  Py_XDECREF(g->current_device);
  free_object(self);
}

static PyMethodDef methods[] = {{"match", match, METH_VARARGS, NULL},
                                {"checking", checking, METH_O, NULL},
                                {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void*)make},
                              {Py_tp_methods, (void*)methods},
                              {Py_tp_dealloc, (void*)drop},
                              {0, NULL}};
static PyType_Spec spec = {"torch_paged_attn._launch.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT,
                           slots};

int add_guard(PyObject* module) { return add_type(module, "Guard", &spec); }
