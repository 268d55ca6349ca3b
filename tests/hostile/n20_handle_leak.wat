;; 20: makes resources and drops none.
(component
  (import "wasi:io/poll@0.2.0" (instance $poll
    (export "pollable" (type $p (sub resource)))
    (export "[method]pollable.ready" (func (param "self" (borrow $p)) (result bool)))))
  (alias export $poll "pollable" (type $pollable))
  (core func $ready (canon lower (func $poll "[method]pollable.ready")))
  (core func $drop (canon resource.drop $pollable))
  (import "wasi:clocks/monotonic-clock@0.2.0" (instance $clock
    (alias outer 1 $pollable (type $pollable))
    (export "pollable" (type $q (eq $pollable)))
    (export "subscribe-duration" (func (param "when" u64) (result (own $q))))))
  (core func $subscribe (canon lower (func $clock "subscribe-duration")))
  (core module $main
    (import "c" "subscribe" (func $subscribe (param i64) (result i32)))
    (import "c" "ready" (func $ready (param i32) (result i32)))
    (import "c" "drop" (func $drop (param i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (loop (drop (call $subscribe (i64.const 1))) (br 0)) i32.const 0))
  (core instance $main (instantiate $main (with "c" (instance (export "subscribe" (func $subscribe)) (export "ready" (func $ready)) (export "drop" (func $drop))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
