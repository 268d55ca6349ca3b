;; 19: the handle 0.
(component
  (import "wasi:io/poll@0.2.0" (instance $poll
    (export "pollable" (type $p (sub resource)))
    (export "[method]pollable.ready" (func (param "self" (borrow $p)) (result bool)))))
  (alias export $poll "pollable" (type $pollable))
  (core func $ready (canon lower (func $poll "[method]pollable.ready")))
  (core func $drop (canon resource.drop $pollable))
  (core module $main
    (import "p" "ready" (func $ready (param i32) (result i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $ready (i32.const 0))))
  (core instance $main (instantiate $main (with "p" (instance (export "ready" (func $ready))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
