;; 31: exports nothing.
(component)
