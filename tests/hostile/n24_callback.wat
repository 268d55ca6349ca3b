;; 24: calls a component within, which calls back into this one.
(component
  (core module $back (func (export "back")))
  (core instance $back (instantiate $back))
  (func $back (canon lift (core func $back "back")))
  (component $inner
    (import "back" (func $back))
    (core func $back (canon lower (func $back)))
    (core module $m (import "b" "back" (func $back)) (func (export "forth") (call $back)))
    (core instance $m (instantiate $m (with "b" (instance (export "back" (func $back))))))
    (func (export "forth") (canon lift (core func $m "forth"))))
  (instance $inner (instantiate $inner (with "back" (func $back))))
  (core func $forth (canon lower (func $inner "forth")))
  (core module $main
    (import "i" "forth" (func $forth))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (call $forth) i32.const 0))
  (core instance $main (instantiate $main (with "i" (instance (export "forth" (func $forth))))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
