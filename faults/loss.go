package faults

// Loss drops each packet by itself with one probability (Bernoulli).
type Loss struct {
	Probability float64 `json:"probability"` // 0 to 1
}

func (l *Loss) check() error {
	if !(l.Probability >= 0 && l.Probability <= 1) { // so that NaN fails
		return &SpecError{Field: "loss.probability", Problem: "must be from 0 to 1"}
	}
	return nil
}

func (l *Loss) decider() decider { return lossDecider{newThreshold(l.Probability)} }

type lossDecider struct{ threshold threshold }

func (l lossDecider) decide(d *draw, o *outcome) bool {
	if !l.threshold.hit(d.word(laneLoss)) {
		return false
	}
	o.lost = true
	return true
}
