package faults

import (
	"math/bits"
	"time"
)

// lateness is a histogram of how much later than wanted packets were released.
// Its buckets are 1/16 of an octave wide, so that a percentile is true to
// 6.25 %, and no finer than 1.024 µs.
type lateness struct {
	buckets [464]uint64
	samples uint64
	worst   time.Duration
}

func (l *lateness) add(d time.Duration) {
	d = max(d, 0)
	l.samples++
	l.worst = max(l.worst, d)
	l.buckets[min(bucket(uint64(d)>>10), len(l.buckets)-1)]++
}

// percentile returns an upper bound of the p-th (0 to 100) percentile.
func (l *lateness) percentile(p uint64) time.Duration {
	want := (l.samples*p + 99) / 100
	var seen uint64
	for i, n := range l.buckets {
		if seen += n; seen >= want && n > 0 {
			return min(time.Duration(bucketEnd(i)<<10), l.worst)
		}
	}
	return 0
}

// bucket numbers a value: exact below 16, then 16 to an octave.
func bucket(v uint64) int {
	if v < 16 {
		return int(v)
	}
	shift := bits.Len64(v) - 5
	return (shift+1)*16 + int(v>>shift&15)
}

// bucketEnd is the first value beyond a bucket.
func bucketEnd(i int) uint64 {
	if i < 16 {
		return uint64(i) + 1
	}
	shift := i/16 - 1
	return uint64(16+(i&15)+1) << shift
}
