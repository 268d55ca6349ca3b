;; 10: three memories, each under the limit.
(component
  (core module $o0 (memory 0) (func (export "grow") (result i32) (memory.grow (i32.const 2000))))
  (core instance $o0 (instantiate $o0)) (core module $o1 (memory 0) (func (export "grow") (result i32) (memory.grow (i32.const 2000))))
  (core instance $o1 (instantiate $o1)) (core module $o2 (memory 0) (func (export "grow") (result i32) (memory.grow (i32.const 2000))))
  (core instance $o2 (instantiate $o2))
  (core module $main
    (import "o0" "grow" (func $g0 (result i32))) (import "o1" "grow" (func $g1 (result i32))) (import "o2" "grow" (func $g2 (result i32)))
    (memory (export "memory") 1)
    (func (export "run") (result i32) (if (call $g0) (then (drop (i32.div_u (i32.const 1) (i32.const 0))))) (if (call $g1) (then (drop (i32.div_u (i32.const 1) (i32.const 0))))) (if (i32.eq (call $g2) (i32.const -1)) (then unreachable)) i32.const 0))
  (core instance $main (instantiate $main (with "o0" (instance $o0)) (with "o1" (instance $o1)) (with "o2" (instance $o2))))
  (func (export "run") (result (result (error string)))
    (canon lift (core func $main "run") (memory (core memory $main "memory")))))
